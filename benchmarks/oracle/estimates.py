"""Mean and variance of an estimator: lessons as in a real run, and the gradient of the loss `pg`, in numpy.

Legend: K paths · G rollouts per group · T trunks of them · P parameters · N groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.options import bound_credit
from lightningrl.config import AlgorithmConfig
from lightningrl.types import Doubles

from .groups import Group
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


def estimates(method: Method, advantage: str, groups: Sequence[Group]) -> Doubles:
    """[N, P] the estimate of each group: 1/T Σ share · A ∇ log π over T trunks and their branches. Advantages over the
    batch see one group at a time.
    """
    algorithm = AlgorithmConfig(
        credit=method.credit,
        credit_options=dict(method.options),
        advantage=advantage,
        group_by="role" if method.by_role else "task",
    )
    batches = [[group] for group in groups] if advantage.startswith("reinforce") else [groups]
    return np.concatenate([_batch(algorithm, batch) for batch in batches])


def _batch(algorithm: AlgorithmConfig, groups: Sequence[Group]) -> Doubles:
    rollouts = [
        replace(path.trajectory, group_id=f"g{n}", rollout_id=f"g{n}/{i}")
        for n, group in enumerate(groups)
        for i, path in enumerate(group)
    ]
    lessons, _ = lessons_of(rollouts, algorithm)
    A = np.array([lesson.advantages[0] for lesson in lessons], np.float64)
    if algorithm.credit_options.get("siblings") == "shared":
        A *= _shares(algorithm, groups)
    per_call = np.concatenate([path.gradients for group in groups for path in group])
    calls = np.array([sum(len(path.gradients) for path in group) for group in groups])
    trunks = np.array([sum(path.trajectory.branch is None for path in group) for group in groups])
    return np.add.reduceat(A[:, None] * per_call, np.cumsum(calls) - calls) / trunks[:, None]


def _shares(algorithm: AlgorithmConfig, groups: Sequence[Group]) -> Doubles:
    """[calls of all groups]"""
    credit = bound_credit(algorithm)
    found = [given.shares for group in groups for given in credit([path.trajectory for path in group])]
    return np.concatenate([shares for shares in found if shares is not None])


def weighted(aggregation: str, groups: Sequence[Group]) -> Doubles:
    """[N, P] the gradient of the real loss with its weights, for `uniform` and `rloo`."""
    algorithm = AlgorithmConfig.model_validate({"advantage": "rloo", "aggregation": aggregation})
    made: list[Doubles] = []
    for group in groups:
        lessons, _ = lessons_of(
            [replace(path.trajectory, rollout_id=f"{i}") for i, path in enumerate(group)], algorithm
        )
        wA = np.array([lesson.weights[0] * lesson.advantages[0] for lesson in lessons])
        made.append(wA @ np.concatenate([path.gradients for path in group]))
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


def z_scores(g: Doubles, expected: Doubles) -> Doubles:
    """[P] deviation of the mean over sampled groups from `expected`, in standard errors; 0 without variance."""
    error = g.std(axis=0, ddof=1) / math.sqrt(len(g))
    off = g.mean(axis=0) - expected
    return np.divide(off, error, out=np.zeros_like(off), where=error > 1e-9)


def expected_return(method: Method, world: World, theta: Doubles) -> float:
    """The objective as a number, for numerical differentiation."""
    return sum(path.probability * method.objective(path) for path in world.paths(theta))
