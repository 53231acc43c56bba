"""How much weight does each sampled token have? Computed over the whole batch, so packing cannot change it.

    rollout-mean   w = 1 / (R · n_rollout)      every rollout has the same weight
    call-mean      w = 1 / (C · n_call)         every call has the same weight
    token-mean     w = 1 / T                    every token has the same weight (DAPO, arXiv 2503.14476, eq. 8)

R, C and T are the numbers of trained rollouts, calls and tokens; n_… is the number of trained tokens of a rollout or
call. The weights sum to 1. Example: two rollouts, one with two calls of one and three tokens, one with a call of two
tokens:

    rollout-mean   1/8 1/8   1/4        call-mean   1/3 1/9   1/6        token-mean   1/6 1/6   1/6

A mean over a varying number of tokens is biased (docs/oracles.md). A sum would be unbiased, but the size of the batch
would then change the step size.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from lightningrl.types import Doubles, Trajectory

Aggregation: TypeAlias = Literal["rollout-mean", "call-mean", "token-mean"]


def token_weights(trajectories: Sequence[Trajectory], *, aggregation: Aggregation) -> list[Doubles]:
    """For each trajectory [calls]: the weight of each sampled token of the call; 0 for a call that is left out."""
    lengths = [_trained_tokens(t) for t in trajectories]
    per_rollout = np.array([n.sum() for n in lengths], dtype=np.int64)
    match aggregation:
        case "rollout-mean":
            R = np.count_nonzero(per_rollout)
            return [np.where(n > 0, 1.0 / max(R * n.sum(), 1), 0.0) for n in lengths]
        case "call-mean":
            C = sum(np.count_nonzero(n) for n in lengths)
            return [np.where(n > 0, 1.0 / np.maximum(C * n, 1), 0.0) for n in lengths]
        case "token-mean":
            return [np.where(n > 0, 1.0 / max(per_rollout.sum(), 1), 0.0) for n in lengths]


def _trained_tokens(trajectory: Trajectory) -> np.ndarray:
    return np.array(
        [len(t.completion_ids) if t.left_out is None else 0 for t in trajectory.transitions], dtype=np.int64
    )
