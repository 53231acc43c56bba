"""How certain is a mean over tasks, or a difference? Percentile bootstrap (Efron 1979), paired permutation test."""

from dataclasses import dataclass

import numpy as np

from lightningrl.types import Doubles

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of two policies' rewards on the same tasks."""

    mean: float
    low: float
    high: float
    """`low` and `high`: 95 % interval, bootstrap over tasks."""
    p: float
    """Two-sided: how often swapping the two at random on each task makes a difference as large."""
    tasks: int
    """Number of tasks on which neither failed."""


def paired_difference(values: Doubles, others: Doubles, *, seed: int = 0) -> Difference:
    """`values` [tasks] minus `others` [tasks]; NaN where a rollout failed.

    [1 1 0] minus [0 1 0]: the mean is 1/3. Only one task differs, and both of its signs give a difference as large, so
    p = 1.
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
    """The interval that contains the mean of `values` [n] with probability `level`."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)
