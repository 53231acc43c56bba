"""Master weights: the optimizer updates float32 copies of parameters with fewer bits (arXiv 1710.03740, section 3.1).

AdamW changes a weight by about the learning rate. In bfloat16, neighbours of 0.02 are 6e-5 to 1.2e-4 apart, so an
update of 1e-6 would be rounded away every time. In float32 updates add up, and the model gets their rounded sum.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Masters:
    """`parameters` in float32 or wider. A parameter that has such a dtype is its own master and is not copied."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {name: _master(p) for name, p in parameters.items()}
        """Master weights by name, for the optimizer and checkpoints."""
        self._narrow = [(p, self.tensors[name]) for name, p in parameters.items() if p is not self.tensors[name]]

    def take_gradients(self) -> None:
        """Add the parameters' gradients to those of the masters, so that several passes are summed in float32."""
        for p, master in self._narrow:
            if p.grad is not None:
                gradient = p.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                p.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters into the parameters, in place: an engine that shares them serves the new weights."""
        for p, master in self._narrow:
            p.copy_(master)


def _master(p: Tensor) -> Tensor:
    wide = torch.promote_types(p.dtype, torch.float32)
    return p if p.dtype == wide else p.detach().to(wide).requires_grad_()
