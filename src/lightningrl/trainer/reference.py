"""The reference policy: the weights at the start of training, for the KL term.

It is the model without its adapter, or else a frozen copy, which checkpoints include.
"""

import copy
from collections.abc import Mapping

from torch import Tensor

from lightningrl.models.dense import DenseModel


class Reference:
    """A model's weights at construction. A copy is saved with every checkpoint: the folder that a run started from may
    have changed when it resumes.
    """

    def __init__(self, model: DenseModel) -> None:
        self.model = _frozen_copy(model) if model.adapter is None else _below_adapter(model)
        """The frozen model."""
        self._copied = model.adapter is None

    def parameters(self) -> Mapping[str, Tensor]:
        """The tensors for a checkpoint: none for a model with an adapter, whose base never changes."""
        return dict(self.model.hf.named_parameters()) if self._copied else {}


def _frozen_copy(model: DenseModel) -> DenseModel:
    return DenseModel(copy.deepcopy(model.hf).requires_grad_(False))


def _below_adapter(model: DenseModel) -> DenseModel:
    from lightningrl.models.lora import without_adapter  # slow to import, and needed only here

    return without_adapter(model)
