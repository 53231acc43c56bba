"""What was a batch made of? Counts and means of its records, whether they are trained or not."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from lightningrl.branches import VOID
from lightningrl.data.tasks import asked
from lightningrl.types import FINAL, Attempt, Call, Capture, Reward, Rollout


def batch_metrics(
    batch: Sequence[Rollout], calls: Sequence[Call], rewards: Sequence[Reward], *, heldout: frozenset[bytes]
) -> dict[str, float]:
    """`area/name` → value. `heldout`: the inputs of the held-out tasks, of which none should be in the batch.

    A played-back call is a call of its rollout, but counts in nothing else: it was counted in its trunk.
    """
    accepted = sum(rollout.accepted_attempt_id is not None for rollout in batch)
    answered = [call for call in calls if call.replays is None]
    captures = Counter(call.capture for call in answered)
    sampled = [len(call.completion_ids) for call in answered]
    tasks = {rollout.group_id: asked(rollout.task) for rollout in batch}
    return {
        "calls/per_rollout": len(calls) / max(accepted, 1),
        "calls/truncated": float(sum(call.finish_reason == "length" for call in answered)),
        "tokens/sampled": float(sum(sampled)),
        "tokens/per_call": float(np.mean(sampled)) if sampled else 0.0,
        **_mean_rewards(rewards, attempts=accepted),
        **{f"calls/{capture}": float(captures[capture]) for capture in get_args(Capture)},
        "tasks/count": float(len(tasks)),
        "tasks/heldout": float(sum(task in heldout for task in tasks.values())),
    }


def fork_metrics(batch: Sequence[Rollout], calls: Sequence[Call], void: Sequence[Attempt]) -> dict[str, float]:
    """`area/name` → value; nothing if no rollout of the batch is a branch. `void`: those of `void_attempts`."""
    branches = sum(rollout.branch is not None for rollout in batch)
    if not branches:
        return {}
    replayed = sum(len(call.completion_ids) for call in calls if call.replays is not None)
    return {"forks/branches": float(branches), "forks/void": float(len(void)), "tokens/replayed": float(replayed)}


def void_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The latest attempt of each rollout whose branch is void. `attempts`: those of failed rollouts, in order."""
    latest = {attempt.rollout_id: attempt for attempt in attempts}
    return [attempt for attempt in latest.values() if (attempt.error or "").startswith(VOID)]


def share_of_logs(attempts: Sequence[Attempt], rewards: Sequence[Reward]) -> float:
    """Share of graded attempts that printed several lines and got 0: perhaps the grader read a log, not an answer."""
    final = {reward.attempt_id: reward.value for reward in rewards if reward.name == FINAL and reward.call_id is None}
    graded = [attempt for attempt in attempts if attempt.id in final]
    logs = [
        attempt
        for attempt in graded
        if isinstance(attempt.output, str) and "\n" in attempt.output and final[attempt.id] == 0
    ]
    return len(logs) / max(len(graded), 1)


def _mean_rewards(rewards: Sequence[Reward], *, attempts: int) -> dict[str, float]:
    """Mean reward of an attempt under each name; `reward/mean` is the final one. Rewards of another source than the
    grader have that source in their name.
    """
    sums: dict[str, float] = {FINAL: 0.0}
    for reward in rewards:
        name = reward.name if reward.source == "grader" else f"{reward.source}.{reward.name}"
        sums[name] = sums.get(name, 0.0) + reward.value
    means = {name: total / max(attempts, 1) for name, total in sums.items()}
    return {"reward/mean": means[FINAL], **{f"reward/{name}": mean for name, mean in means.items()}}
