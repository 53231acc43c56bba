"""How much weight does each sampled token have? Computed over the whole batch, so packing cannot change it.

    rollout-mean   w = 1 / (R · n_rollout)      every rollout has the same weight
    call-mean      w = 1 / (C · n_call)         every call has the same weight
    token-mean     w = 1 / T                    every token has the same weight (DAPO, arXiv 2503.14476, eq. 8)

R, C and T are the numbers of trained rollouts, calls and tokens; n_… is the number of trained tokens of a rollout or
call. The weights sum to 1. Example: two rollouts, one with two calls of one and three tokens, one with a call of two
tokens:

    rollout-mean   1/8 1/8   1/4        call-mean   1/3 1/9   1/6        token-mean   1/6 1/6   1/6

A credit may give calls different shares: then n and T count tokens, and C counts calls, times their shares. A trunk and
its branches are one rollout.

A mean over a varying number of tokens is biased (docs/oracles.md). A sum would be unbiased, but the size of the batch
would then change the step size.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from lightningrl.types import Doubles, Trajectory

Aggregation: TypeAlias = Literal["rollout-mean", "call-mean", "token-mean"]


def token_weights(
    trajectories: Sequence[Trajectory], *, aggregation: Aggregation, shares: Sequence[Doubles | None]
) -> list[Doubles]:
    """For each trajectory [calls]: the weight of each sampled token of the call; 0 for a call that is left out.

    `shares`: for each trajectory [calls], or None: all are 1.
    """
    lengths = [_trained_tokens(t) for t in trajectories]
    share = [np.where(n > 0, 1.0 if s is None else s, 0.0) for n, s in zip(lengths, shares, strict=True)]
    tokens = np.array([s @ n for s, n in zip(share, lengths, strict=True)])
    match aggregation:
        case "rollout-mean":
            family = _families(trajectories)
            of_family = np.bincount(family, weights=tokens, minlength=len(family)) if len(family) else tokens
            R = np.count_nonzero(of_family)
            return [s / _above_0(R * of_family[f]) for s, f in zip(share, family, strict=True)]
        case "call-mean":
            C = sum(s.sum() for s in share)
            return [s / _above_0(C * np.maximum(n, 1)) for s, n in zip(share, lengths, strict=True)]
        case "token-mean":
            return [s / _above_0(tokens.sum()) for s in share]


def _families(trajectories: Sequence[Trajectory]) -> list[int]:
    """For each trajectory the index of its trunk; its own if it is no branch."""
    of_call = {t.call_id: i for i, trajectory in enumerate(trajectories) for t in trajectory.transitions}
    return [
        i if trajectory.branch is None else of_call.get(trajectory.branch.call_id or "", i)
        for i, trajectory in enumerate(trajectories)
    ]


def _above_0(weight: Any) -> Any:
    """No division by 0 where nothing is trained: all shares are 0 there."""
    return np.where(weight > 0, weight, 1.0)


def _trained_tokens(trajectory: Trajectory) -> np.ndarray:
    return np.array(
        [len(t.completion_ids) if t.left_out is None else 0 for t in trajectory.transitions], dtype=np.int64
    )
