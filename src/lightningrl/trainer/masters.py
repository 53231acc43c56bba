"""Master weights: the optimizer updates float32 copies of parameters with fewer bits (arXiv 1710.03740, section 3.1).

AdamW changes a weight by about the learning rate. In bfloat16, neighbours of 0.02 are 6e-5 to 1.2e-4 apart, so an
update of 1e-6 would be rounded away every time (in float16: 8e-6 to 1.5e-5). In float32 updates add up, and the model
gets their rounded sum.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Masters:
    """`parameters` in float32 or wider. A parameter that has such a dtype is its own master and is not copied."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.tensors: dict[str, Tensor] = {name: _master(p) for name, p in parameters.items()}
        """Master weights by name, for the optimizer and checkpoints."""
        self._pairs = [(p, self.tensors[name]) for name, p in parameters.items()]
        self._narrow = [(p, master) for p, master in self._pairs if p is not master]

    def add_gradient(self, loss: Tensor, *, factor: float | None = None) -> bool:
        """Add the gradient of a loss to the masters' gradients, which sum several passes in float32.

        The gradient is computed apart and added when it is complete. A pass that raises, for example because memory ran
        out, leaves the sum as it was. With a `factor` the backward pass runs on that multiple of the loss (see
        `scaling`); False, and nothing is added, if a gradient is then not finite.
        """
        sums = [master.grad for _, master in self._pairs]
        self._set([None] * len(sums))
        try:
            torch.autograd.backward(loss if factor is None else factor * loss)
            if factor is not None and not _finite([p.grad for p, _ in self._pairs if p.grad is not None]):
                self._set(sums)
                return False
            for (p, master), sum_ in zip(self._pairs, sums, strict=True):
                if sum_ is None and p is not master and p.grad is not None:
                    master.grad, p.grad = p.grad.to(master.dtype), None
        except BaseException:
            self._set(sums)
            raise
        share = 1.0 if factor is None else 1.0 / factor
        for (p, master), sum_ in zip(self._pairs, sums, strict=True):  # in place: nothing here allocates
            if sum_ is not None:
                gradient, p.grad = p.grad, None
                master.grad = sum_ if gradient is None else sum_.add_(gradient, alpha=share)
            elif factor is not None and master.grad is not None:
                master.grad.mul_(share)
        return True

    def narrow(self) -> list[Tensor]:
        """The parameters that have fewer bits than their masters."""
        return [p for p, _ in self._narrow]

    def _set(self, sums: Sequence[Tensor | None]) -> None:
        """Set the masters' gradients and clear those of the parameters."""
        for (p, master), sum_ in zip(self._pairs, sums, strict=True):
            p.grad = None
            master.grad = sum_

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters into the parameters, in place: an engine that shares them serves the new weights."""
        for p, master in self._narrow:
            p.copy_(master)


def _finite(gradients: Sequence[Tensor]) -> bool:
    """Whether no gradient has a NaN or an infinity; the device is asked once."""
    extremes = [extreme.to(torch.float32) for gradient in gradients for extreme in torch.aminmax(gradient)]
    return not extremes or bool(torch.isfinite(torch.stack(extremes)).all())


def _master(p: Tensor) -> Tensor:
    wide = torch.promote_types(p.dtype, torch.float32)
    return p if p.dtype == wide else p.detach().to(wide).requires_grad_()
