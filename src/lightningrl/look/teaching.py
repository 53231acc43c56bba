"""What a rollout taught. Nothing of this is stored: it is recomputed with the functions that training uses.

Advantages compare rollouts of the whole batch, so all records of the step are read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.air import air_rewards
from lightningrl.algorithms.selection import learnable, silent_groups
from lightningrl.config import Config
from lightningrl.data.forest import Lesson
from lightningrl.errors import LightningError
from lightningrl.look.opened import Opened
from lightningrl.store import Records, Where
from lightningrl.tracing import spans_of, united
from lightningrl.types import Call, Reward, Rollout, Span, accepted_attempts

TRAINED = re.compile(r"train-(?P<step>\d{5})(?:-retry(?P<retry>\d+))?-")
"""Ids of training rollouts; `rollouts.py` makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """What the calls of one rollout taught."""

    step: int | None
    """Optimizer step, from 1; None: not a training rollout."""
    learnt: bool
    """Whether the weights of that step are published. If not, the rollout has yet to teach its `lessons`."""
    why_not: str | None
    """Why the rollout teaches nothing, or why that is not known; None if there are lessons."""
    lessons: Mapping[str, Lesson] = field(default_factory=dict[str, Lesson])
    """Call id → lesson for the policy that answered the call."""
    rewards: tuple[Reward, ...] = ()
    """Rewards by the recipe's AIR rules."""


async def teaching_of(run: Opened, rollout: Rollout) -> Teaching:
    """What the accepted attempt of a rollout taught."""
    named = TRAINED.match(rollout.id)
    if named is None or run.config is None:
        reason = "exams only measure" if rollout.id.startswith("exam-") else "it is not a training rollout"
        if named is not None:
            reason = f"unknown, because {run.no_config}"
        return Teaching(step=None, learnt=False, why_not=reason)
    step = int(named["step"])
    learners = run.config.learners()
    versions = [await run.records.weights(name) for name in learners]
    learnt = all(weights is not None and weights.version > step for weights in versions)
    try:
        lessons, air = await _recomputed(run.records, run.config, step)
    except LightningError as error:
        return Teaching(step=step + 1, learnt=learnt, why_not=f"its advantages cannot be recomputed: {error.message}")
    mine = {call_id: lesson for call_id, lesson in lessons.items() if lesson.rollout_id == rollout.id}
    rewards = tuple(reward for reward in air if reward.attempt_id == rollout.accepted_attempt_id)
    return Teaching(
        step=step + 1,
        learnt=learnt,
        why_not=None if mine else _why_nothing(run.config, rollout),
        lessons=mine,
        rewards=rewards,
    )


def _why_nothing(config: Config, rollout: Rollout) -> str:
    if rollout.accepted_attempt_id is None:
        return "no attempt was accepted: failed rollouts are left out of their group"
    if all(learner.algorithm.credit == "gae_calls" for learner in config.learners().values()):
        return "its credit needs a critic, whose values are not recorded"
    return "it made no call, or dynamic sampling replaced its group, as all rewards in it were equal"


async def _recomputed(records: Records, config: Config, step: int) -> tuple[dict[str, Lesson], list[Reward]]:
    """(call id → lesson, AIR rewards) of a whole step."""
    learners = config.learners()
    batch = await step_batch(records, step, names={learner.algorithm.reward for learner in learners.values()})
    accepted = accepted_attempts(batch)
    calls, rewards = await records.calls(accepted), await records.rewards(accepted)
    air = air_of(config, await records.spans(accepted), calls)
    lessons: dict[str, Lesson] = {}
    for name, learner in learners.items():
        if learner.algorithm.credit == "gae_calls":
            continue
        trajectories, _ = learnable(
            batch,
            calls,
            rewards,
            air=air,
            policy=name,
            algorithm=learner.algorithm,
            routes=config.routes,
            root=config.root,
            oldest_version=step - config.loop.max_off_policy_steps,
        )
        made, _ = lessons_of(trajectories, learner.algorithm, root=config.root)
        own = {call.id for call in calls if call.policy == name}
        lessons |= {lesson.transition.call_id: lesson for lesson in made if lesson.transition.call_id in own}
    return lessons, air


def air_of(config: Config, spans: Sequence[Span], calls: Sequence[Call]) -> list[Reward]:
    return air_rewards(united(spans, spans_of(calls)), config.air, root=config.root) if config.air else []


async def step_batch(records: Records, step: int, *, names: set[str]) -> list[Rollout]:
    """The rollouts that a step learns from. Dynamic sampling replaces silent groups, as in `Rollouts.collect`."""
    rounds: dict[int, list[Rollout]] = {}
    for rollout in await records.rollouts(where=Where(prefix=f"train-{step:05d}-")):
        found = TRAINED.match(rollout.id)
        rounds.setdefault(int(found["retry"] or 0) if found else 0, []).append(rollout)
    batch = rounds.pop(0, [])
    for retry in sorted(rounds):
        rewards = await records.rewards(accepted_attempts(batch))
        silent = silent_groups(batch, rewards, names=names)
        batch = [rollout for rollout in batch if rollout.group_id not in silent] + rounds[retry]
    return batch
