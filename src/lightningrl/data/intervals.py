"""How certain is a mean over tasks, or a difference? Percentile bootstrap (Efron 1979), paired permutation test, and
for a mean over groups of siblings a clustered variance.
"""

import math
from dataclasses import dataclass

import numpy as np

from lightningrl.types import Doubles, Ints

RESAMPLES = 10_000

DRAWN = 2**16
"""Values that are drawn together: few enough for the cache of a processor."""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's distribution with 1 to 10 degrees of freedom."""


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
    """The interval that contains the mean of `values` [n] with probability `level`. NaN without values."""
    n = len(values)
    if not n:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    rows = max(1, DRAWN // n)
    for start in range(0, RESAMPLES, rows):
        part = means[start : start + rows]
        part[:] = values[rng.integers(0, n, size=(len(part), n))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def clustered_mean(values: Doubles, clusters: Ints) -> tuple[float, float] | None:
    """95 % interval of the mean of `values` [n]. Values of one cluster depend on each other, as rollouts of one task.

    `clusters` [n]: number of each value's cluster. The variance is that of a ratio estimator (Liang & Zeger 1986) with
    Student's quantile for the number of clusters. Every cluster counts by its size. None: fewer than two clusters.

    [1 1 0 0] in clusters [0 0 1 1]: one of two tasks is solved, which says nearly nothing: the interval is (-5.9, 6.9).
    """
    _, places = np.unique(clusters, return_inverse=True)
    G, N = places.max(initial=-1) + 1, len(values)
    if G < 2:
        return None
    mean = values.mean()
    sums = np.bincount(places, values - mean)
    half = _student(G - 1) * math.sqrt(G / (G - 1) * (sums**2).sum()) / N
    return float(mean - half), float(mean + half)


def _student(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution: a table, then Abramowitz & Stegun 26.7.5, to within 0.003."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    return 1.960 + 2.372 / degrees + 2.823 / degrees**2
