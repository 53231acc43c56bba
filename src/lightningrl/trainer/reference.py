"""The reference policy: the weights at the start of training, for the KL term.

It is the model without its adapter, or else a frozen copy, which checkpoints include.
"""

from collections.abc import Mapping

from torch import Tensor

from lightningrl.models.base import Decoder


class Reference:
    """A model's weights at construction. A copy is saved with every checkpoint: the folder that a run started from may
    have changed when it resumes.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model.base or model.frozen_copy()
        """The frozen model."""
        self._copied = model.base is None

    def parameters(self) -> Mapping[str, Tensor]:
        """The tensors for a checkpoint: none for a model with an adapter, whose base never changes."""
        return dict(self.model.hf.named_parameters()) if self._copied else {}
