"""How good was each call, compared with the rest of its group? Values of a group in, advantages of the same shape out.

Baselines are over rollouts, not over rows: a rollout counts once, with the mean of its calls' values, however many calls it made.

Legend: G rollouts of a group · v[i][c] value of call c of rollout i · V[i] mean over c of v[i][c].
"""

from collections.abc import Sequence

import numpy as np

from lightningrl.types import Doubles

EPS = 1e-6
"""Keeps GRPO's division finite. Equal values never reach it: their advantage is 0 exactly."""


def grpo(values: Sequence[Doubles]) -> list[Doubles]:
    """A[i][c] = (v[i][c] - mean(V)) / (s + EPS),  s² = 1/(G-1) Σ_i mean_c (v[i][c] - mean(V))².   (arXiv 2402.03300, eq. 4)

    With one value per rollout `s` is the unbiased standard deviation of the group. Where the calls of a rollout differ, their spread is
    part of `s`, so that rollouts with equal means cannot blow it up.
    """
    if _no_comparison(values):
        return [np.zeros_like(v) for v in values]
    baseline = np.mean([v.mean() for v in values])
    s = np.sqrt(np.sum([np.mean((v - baseline) ** 2) for v in values]) / (len(values) - 1))
    return [(v - baseline) / (s + EPS) for v in values]


def rloo(values: Sequence[Doubles]) -> list[Doubles]:
    """A[i][c] = v[i][c] - mean over j ≠ i of V[j].   (arXiv 2402.14740, section 2.2)"""
    if _no_comparison(values):
        return [np.zeros_like(v) for v in values]
    V = np.array([v.mean() for v in values])
    others = (V.sum() - V) / (len(V) - 1)
    return [v - b for v, b in zip(values, others, strict=True)]


def _no_comparison(values: Sequence[Doubles]) -> bool:
    """A group of one, or one in which every call was worth the same: nothing to learn, exactly."""
    flat = np.concatenate(list(values))
    return len(values) < 2 or bool((flat == flat[0]).all())
