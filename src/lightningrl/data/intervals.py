"""How sure are we of a mean? Percentile bootstrap (Efron 1979), over tasks."""

import numpy as np

from lightningrl.types import Doubles

RESAMPLES = 10_000


def bootstrap_mean(values: Doubles, *, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """The interval that holds the mean of `values` [n] with probability `level`."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
