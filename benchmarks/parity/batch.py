"""The batch of all parity tests: small enough to read, with every case that a loss distinguishes.

Rollouts have one to three calls. For TRL and verl a rollout is a row, with masked positions between its calls. All
numbers are multiples of 2^-10: exact in float32, so that input rounding cannot affect a comparison.

Legend: R rollouts (rows) · T positions of a row · M sampled tokens, row by row.
"""

from typing import Any

import numpy as np

CALLS = [[3], [2, 3], [1], [4, 2], [5], [1, 1, 1], [2], [3, 1], [4], [2, 2], [1], [3], [3, 2]]
"""Sampled tokens of each call of each rollout."""
GROUPS = ["a", "a", "a", "a", "b", "b", "b", "b", "c", "c", "c", "c", "d"]
"""`c` has equal rewards, `d` one rollout."""
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.75]
ADVANTAGES = [0.75, -1.25, -0.5, 1.0, -0.25, -0.5, -0.75, 1.5, 0.0, 0.0, 0.0, 0.0, -1.0]
"""Advantages for the losses; independent of the rewards."""
T = 10


def make_batch() -> dict[str, Any]:
    """Lists of M numbers; those of rollouts have R.

    `behaviour`: logprobs under the weights that sampled. `old`: under the weights before the first update on the batch.
    `new`: under the current weights, far enough from `old` to reach every clip. `reference`: for the KL divergence.
    `advantages_of_calls` differ within a rollout.
    """
    rng = np.random.default_rng(4)
    sampled = [n for calls in CALLS for n in calls]
    M = sum(sampled)
    old = -rng.uniform(0.1, 3.0, M)
    new = np.minimum(old + rng.normal(0, 0.3, M), -0.01)
    old[[4, 16]], new[[4, 16]] = -2.0, [-0.5, -0.75]  # at negative advantages, far enough for the dual clip
    behaviour = old + rng.normal(0, 0.35, M)
    behaviour[[2, 10, 23]] = old[[2, 10, 23]] - 1.0  # e > 2: these are capped, rejected or masked
    return {
        "calls": CALLS,
        "groups": GROUPS,
        "rewards": REWARDS,
        "advantages": ADVANTAGES,
        "advantages_of_calls": np.repeat(_exact(rng.normal(0, 1, len(sampled))), sampled).tolist(),
        "old": _exact(old),
        "new": _exact(new),
        "behaviour": _exact(behaviour),
        "reference": _exact(new + rng.normal(0, 0.3, M)),
        "entropies": _exact(rng.uniform(0.1, 2.0, M)),
        "values": _exact(rng.uniform(-0.5, 1.0, M)),
        "old_values": _exact(rng.uniform(-0.5, 1.0, M)),
        "step_rewards": _exact(np.where(rng.uniform(size=M) < 0.4, rng.normal(0, 0.5, M), 0.0)),
    }


def row_mask() -> np.ndarray:
    """[R T] 1 for sampled positions. One unsampled position separates two calls."""
    mask = np.zeros((len(CALLS), T))
    for row, calls in enumerate(CALLS):
        start = 0
        for n in calls:
            mask[row, start : start + n] = 1
            start += n + 1
    return mask


def rows(flat: list[float]) -> np.ndarray:
    """[M] → [R T]"""
    mask = row_mask()
    mask[mask == 1] = flat
    return mask


def _exact(numbers: np.ndarray) -> list[float]:
    return (np.round(numbers * 1024) / 1024).tolist()
