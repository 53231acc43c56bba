"""Builds small trajectories."""

from collections.abc import Sequence

import numpy as np

from lightningrl.types import Trajectory, Transition


def call(
    name: str,
    *,
    prompt: Sequence[int] = (0, 1, 2),
    tokens: int = 1,
    reward: float | None = None,
    value: float | None = None,
    parent: str | None = None,
    agent: str = "writer",
    span: tuple[float, float] = (0.0, 0.0),
    truncated: bool = False,
    left_out: str | None = None,
) -> Transition:
    return Transition(
        call_id=name,
        parent_call_id=parent,
        agent=agent,
        policy_version=0,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        reward=reward,
        value=value,
        started_at=span[0],
        ended_at=span[1],
        truncated=truncated,
        left_out=left_out,
    )


def rollout(name: str, reward: float, *calls: Transition, group: str = "g") -> Trajectory:
    return Trajectory(rollout_id=name, group_id=group, task_id="t", transitions=calls, reward=reward)
