"""How sure are we of a mean, or of a difference? Over tasks: percentile bootstrap (Efron 1979), and a paired
permutation test.
"""

from dataclasses import dataclass

import numpy as np

from lightningrl.types import Doubles

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more one gets than another on the same tasks."""

    mean: float
    low: float
    high: float
    """95 %, bootstrap over tasks."""
    p: float
    """Two-sided: how often chance alone, swapping the two on each task, makes as large a difference."""
    tasks: int
    """Those that neither has failed."""


def paired_difference(values: Doubles, others: Doubles, *, seed: int = 0) -> Difference:
    """`values` [tasks] less `others` [tasks]; NaN where a rollout failed.

    [1 1 0] less [0 1 0]: mean 1/3; of the two signs that the one difference can have, both are as large: p = 1.
    """
    paired = values - others
    paired = paired[~np.isnan(paired)]
    if not len(paired):
        return Difference(mean=np.nan, low=np.nan, high=np.nan, p=np.nan, tasks=0)
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=(RESAMPLES, len(paired)))
    found = abs(paired.mean())
    as_large = int((np.abs((signs * paired).mean(axis=1)) >= found - 1e-12).sum())
    low, high = bootstrap_mean(paired, seed=seed)
    return Difference(
        mean=float(paired.mean()), low=low, high=high, p=(as_large + 1) / (RESAMPLES + 1), tasks=len(paired)
    )


def bootstrap_mean(values: Doubles, *, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """The interval that holds the mean of `values` [n] with probability `level`."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
