"""Which weights did training start from? The same model without its adapter, or else a frozen copy that checkpoints
take along.
"""

import copy
from collections.abc import Mapping

from torch import Tensor

from lightningrl.models.dense import DenseModel


class Reference:
    """Of a model as it is at construction. What is copied is saved with every checkpoint: a run that goes on may have
    been started from others.
    """

    def __init__(self, model: DenseModel) -> None:
        self.model = _frozen_copy(model) if model.adapter is None else _below_adapter(model)
        """The model to ask."""
        self._copied = model.adapter is None

    def parameters(self) -> Mapping[str, Tensor]:
        """What a checkpoint must hold of it: nothing where the trained model has an adapter, as what is below never
        changes.
        """
        return dict(self.model.hf.named_parameters()) if self._copied else {}


def _frozen_copy(model: DenseModel) -> DenseModel:
    return DenseModel(copy.deepcopy(model.hf).requires_grad_(False))


def _below_adapter(model: DenseModel) -> DenseModel:
    from lightningrl.models.lora import without_adapter  # slow to import, and needed only here

    return without_adapter(model)
