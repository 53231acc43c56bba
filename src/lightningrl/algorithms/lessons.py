"""What is each sampled token to teach? credit → truncation penalty → advantage over whole groups → weights.

Everything is computed over all members of a group; what is left out only gets a weight of 0 at the very end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lightningrl import plugins
from lightningrl.algorithms.weights import token_weights
from lightningrl.config import AlgorithmConfig
from lightningrl.data.forest import Lesson
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Trajectory


def lessons_of(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, *, root: Path | None = None) -> tuple[list[Lesson], dict[str, float]]:
    """One lesson per call, in order, and what there is to say about them. `root`: where a recipe's own functions are imported from."""
    credit = plugins.load(algorithm.credit, kind="credit", root=root)
    values = [_values(t, credit, algorithm) for t in trajectories]
    advantages = _advantages(trajectories, values, algorithm, root=root)
    weights = token_weights(trajectories, aggregation=algorithm.aggregation)
    made = [
        Lesson(
            rollout_id=trajectory.rollout_id,
            group_id=trajectory.group_id,
            transition=call,
            advantages=np.full(len(call.completion_ids), A[c], dtype=np.float32),
            weights=np.full(len(call.completion_ids), w[c], dtype=np.float64),
        )
        for trajectory, A, w in zip(trajectories, advantages, weights, strict=True)
        for c, call in enumerate(trajectory.transitions)
    ]
    return made, {**_group_metrics(trajectories), **_token_metrics(made)}


def groups(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    """Group id → which trajectories are its members."""
    members: dict[str, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group_id, []).append(i)
    return members


def _values(trajectory: Trajectory, credit: Callable[[Trajectory], Doubles], algorithm: AlgorithmConfig) -> Doubles:
    """[calls] credit, less the penalty of calls that were cut off."""
    values = np.asarray(credit(trajectory), dtype=np.float64)
    _check(values, shape=(len(trajectory.transitions),), what=f"credit `{algorithm.credit}`")
    return values - algorithm.truncation_penalty * np.array([t.truncated for t in trajectory.transitions], dtype=np.float64)


def _advantages(trajectories: Sequence[Trajectory], values: list[Doubles], algorithm: AlgorithmConfig, *, root: Path | None) -> list[Doubles]:
    """For each trajectory [calls]. A rollout without any call is still part of its group's baseline, with its final reward."""
    compare = plugins.load(algorithm.advantage, kind="advantage", root=root)
    advantages = [np.zeros_like(v) for v in values]
    for members in groups(trajectories).values():
        compared = compare([values[i] if len(values[i]) else np.array([trajectories[i].reward]) for i in members])
        for i, A in zip(members, compared, strict=True):
            if len(values[i]):
                _check(A, shape=values[i].shape, what=f"advantage `{algorithm.advantage}`")
                advantages[i] = A
    return advantages


def _check(array: Doubles, *, shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape or not np.isfinite(array).all():
        raise UserError(f"{what} gave `{array}`", hint=f"it must give finite numbers of shape {shape}: one for each call")


def _group_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    members = groups(trajectories)
    equal = sum(len({trajectories[i].reward for i in m}) == 1 for m in members.values())
    rewards = np.array([t.reward for t in trajectories]) if trajectories else np.zeros(1)
    return {"reward/mean": float(rewards.mean()), "groups/count": float(len(members)), "groups/equal_rewards": float(equal)}


def _token_metrics(made: Sequence[Lesson]) -> dict[str, float]:
    A = np.concatenate([le.advantages[le.weights > 0] for le in made] or [np.zeros(0, np.float32)]).astype(np.float64)
    return {
        "advantage/mean": float(A.mean()) if len(A) else 0.0,
        "advantage/std": float(A.std()) if len(A) else 0.0,
        "advantage/max": float(np.abs(A).max()) if len(A) else 0.0,
        "tokens/trained": float(len(A)),
        "tokens/zero_advantage": float(np.count_nonzero(A == 0)),
    }
