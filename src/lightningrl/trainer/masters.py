"""Which tensors does the optimizer change? Those of the model itself, or copies in float32 if the model computes in
fewer bits.

AdamW moves a weight by about the learning rate. Weights of 0.02 in bfloat16 are 6e-5 to 1.2e-4 apart, so an update of
1e-6 would be rounded away every time. In float32 the updates add up, and the model gets their sum, rounded (mixed
precision: arXiv 1710.03740, section 3.1).
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Masters:
    """The weights of `parameters` in float32 or wider. A parameter that has this type is its own master: nothing is
    copied.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {name: _master(p) for name, p in parameters.items()}
        """For the optimizer and for checkpoints, by name."""
        self._narrow = [(p, self.tensors[name]) for name, p in parameters.items() if p is not self.tensors[name]]

    def take_gradients(self) -> None:
        """Move what a backward pass has left at the parameters: sums over several passes are then made in float32, too."""
        for p, master in self._narrow:
            if p.grad is not None:
                gradient = p.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                p.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Give the parameters the values of their masters, in place: an engine that shares them serves the new ones."""
        for p, master in self._narrow:
            p.copy_(master)


def _master(p: Tensor) -> Tensor:
    wide = torch.promote_types(p.dtype, torch.float32)
    return p if p.dtype == wide else p.detach().to(wide).requires_grad_()
