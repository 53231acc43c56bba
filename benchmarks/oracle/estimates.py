"""Mean and variance of an estimator: lessons as in a real run, and the gradient of the loss `pg`, in numpy.

Legend: K paths · G rollouts per group · P parameters · N groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import numpy as np

from lightningrl.algorithms import lessons_of
from lightningrl.config import AlgorithmConfig
from lightningrl.types import Doubles, Ints

from .methods import Method
from .worlds import Path, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The first two moments of an estimator, over all possible groups of G."""

    factor: float
    """Length of its mean along the gradient, in units of the gradient."""
    bias: float
    """Share of its mean that is orthogonal to the gradient: the sine of the angle between them."""
    variance: float
    """Trace of the covariance of one group's estimate, divided by the square of (factor · gradient)."""


def gradient(method: Method, paths: Sequence[Path]) -> Doubles:
    """[P] ∇ Σ_k p_k J_k = Σ_k p_k J_k Σ_c ∇ log π(c)."""
    return np.sum([path.probability * method.objective(path) * path.gradients.sum(axis=0) for path in paths], axis=0)


def all_groups(paths: Sequence[Path], *, size: int) -> tuple[Ints, Doubles]:
    """[N, G] all possible groups, regardless of order, and [N] the probability of each."""
    groups = np.array(list(combinations_with_replacement(range(len(paths)), size)), np.int32)
    p = np.array([path.probability for path in paths])
    orders = [
        math.factorial(size) / math.prod(math.factorial(n) for n in np.unique(group, return_counts=True)[1])
        for group in groups
    ]
    return groups, np.array(orders) * p[groups].prod(axis=1)


def estimates(method: Method, advantage: str, paths: Sequence[Path], groups: Ints) -> Doubles:
    """[N, P] the estimate of each group: 1/G Σ A ∇ log π. Advantages over the batch see one group at a time."""
    algorithm = AlgorithmConfig(
        credit=method.credit,
        credit_options=dict(method.options),
        advantage=advantage,
        group_by="role" if method.by_role else "task",
    )
    batches = np.split(groups, len(groups)) if advantage.startswith("reinforce") else [groups]
    return np.concatenate([_batch(algorithm, paths, batch) for batch in batches]) / groups.shape[1]


def _batch(algorithm: AlgorithmConfig, paths: Sequence[Path], groups: Ints) -> Doubles:
    rollouts = [
        replace(paths[k].trajectory, group_id=f"g{n}", rollout_id=f"g{n}/{i}")
        for n, group in enumerate(groups)
        for i, k in enumerate(group)
    ]
    lessons, _ = lessons_of(rollouts, algorithm)
    A = np.array([lesson.advantages[0] for lesson in lessons], np.float64)
    per_call = np.concatenate([paths[k].gradients for group in groups for k in group])
    calls = np.array([sum(len(paths[k].gradients) for k in group) for group in groups])
    return np.add.reduceat(A[:, None] * per_call, np.cumsum(calls) - calls)


def weighted(aggregation: str, paths: Sequence[Path], groups: Ints) -> Doubles:
    """[N, P] the gradient of the real loss with its weights, for `uniform` and `rloo`."""
    algorithm = AlgorithmConfig.model_validate({"advantage": "rloo", "aggregation": aggregation})
    made: list[Doubles] = []
    for group in groups:
        lessons, _ = lessons_of(
            [replace(paths[k].trajectory, rollout_id=f"{i}") for i, k in enumerate(group)], algorithm
        )
        wA = np.array([lesson.weights[0] * lesson.advantages[0] for lesson in lessons])
        made.append(wA @ np.concatenate([paths[k].gradients for k in group]))
    return np.array(made)


def moments(g: Doubles, p: Doubles, exact: Doubles) -> Estimate:
    """The moments, from the estimates `g` [N, P] of all groups and their probabilities `p` [N]."""
    mean = p @ g
    factor = float(mean @ exact / (exact @ exact))
    across = float(np.linalg.norm(mean - factor * exact))
    variance = float(p @ (g**2).sum(axis=1) - mean @ mean)
    return Estimate(
        factor=factor,
        bias=across / float(np.linalg.norm(mean)),
        variance=variance / float((factor * exact) @ (factor * exact)),
    )


def drawn(paths: Sequence[Path], *, count: int, size: int, seed: int) -> Ints:
    """[N, G] groups, sampled as in a run."""
    p = np.array([path.probability for path in paths])
    return np.random.default_rng(seed).choice(len(paths), size=(count, size), p=p / p.sum()).astype(np.int32)


def z_scores(g: Doubles, expected: Doubles) -> Doubles:
    """[P] deviation of the mean over sampled groups from `expected`, in standard errors; 0 without variance."""
    error = g.std(axis=0, ddof=1) / math.sqrt(len(g))
    off = g.mean(axis=0) - expected
    return np.divide(off, error, out=np.zeros_like(off), where=error > 1e-9)


def expected_return(method: Method, world: World, theta: Doubles) -> float:
    """The objective as a number, for numerical differentiation."""
    return sum(path.probability * method.objective(path) for path in world.paths(theta))
