"""Loss scaling: float16 gradients neither vanish nor overflow (arXiv 1710.03740, section 3.2).

Positive float16 numbers go from 6e-8 to 65504. So the backward pass runs on a multiple of the loss, and the gradient of
each parameter is divided by the factor in float32. The factor is a power of two: the division is exact. A forest whose
gradient overflows is done again with half the factor, so no token is lost. After many forests without an overflow the
factor is doubled.
"""

from collections.abc import Mapping

import torch

INITIAL, GROWTH_FORESTS = 2.0**16, 2000
"""As in `torch.amp.GradScaler`, which counts updates."""
SMALLEST = 2.0**-14
"""If a gradient overflows even with this factor, another one does not help."""


def smaller(factor: float | None) -> float | None:
    """The factor to try next for a forest whose gradient has overflowed; None: no factor would help."""
    return factor / 2 if factor is not None and factor > SMALLEST else None


class LossScale:
    """The factor for a model in `dtype`. Only float16 needs one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.value: float | None = INITIAL if dtype == torch.float16 else None
        """None: the loss is not scaled."""
        self._forests = 0
        """Forests since the factor has changed."""

    def fits(self, factor: float | None) -> None:
        """A forest's gradient was finite with this factor: `value`, or what `smaller` gave."""
        if self.value is None or factor is None:
            return
        self._forests = self._forests + 1 if factor == self.value else 0
        self.value = factor
        if self._forests == GROWTH_FORESTS:
            self.value, self._forests = 2 * factor, 0

    def counters(self) -> Mapping[str, float]:
        """For a checkpoint."""
        return {} if self.value is None else {"loss_scale": self.value, "loss_scale_forests": self._forests}

    def resume(self, counters: Mapping[str, float]) -> None:
        """Go on from a checkpoint's counters. Those of a model in another dtype have none for the factor."""
        if self.value is not None and "loss_scale" in counters:
            self.value, self._forests = counters["loss_scale"], int(counters["loss_scale_forests"])
