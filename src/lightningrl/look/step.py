"""What a step taught, recomputed from all of its records with the functions that training uses. It is kept in memory,
as people look at one rollout of a step after another.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.air import air_rewards
from lightningrl.algorithms.lessons import Account, accounts_of
from lightningrl.algorithms.selection import learnable, silent_groups
from lightningrl.config import AlgorithmConfig, Config, LearnerConfig
from lightningrl.data.forest import Lesson
from lightningrl.data.taught import Taught, taught_file
from lightningrl.errors import LightningError, UserError
from lightningrl.look.taught import taught_of
from lightningrl.store import Records, Where
from lightningrl.tracing import spans_of, united
from lightningrl.types import Call, Reward, Rollout, Span, Trajectory, accepted_attempts, by_attempt

TRAINED = re.compile(r"train-(?P<step>\d{5})(?:-retry(?P<retry>\d+))?-")
"""Ids of training rollouts; `rollouts.py` makes them."""
MOST_BYTES = 256 * 2**20
"""Token ids of the steps that are kept. The step that is asked for is kept in any case."""
TOGETHER = 16
"""Attempts that are read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStep:
    """What one policy learnt from in a step."""

    algorithm: AlgorithmConfig
    own: frozenset[str]
    """Ids of the calls that it answered."""
    trajectories: Mapping[str, Trajectory]
    """By rollout."""
    accounts: Mapping[str, Account]
    """Call id → how its advantage came about. Calls of other policies are among them."""
    taught: Taught | None
    """What was recorded beside the step; None: nothing, or it cannot be read."""
    unreadable: str | None = None
    """Why what was recorded cannot be read; None: it can, or there is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaught:
    """What one step taught all policies."""

    lessons: Mapping[str, Mapping[str, Lesson]] = field(default_factory=dict[str, Mapping[str, Lesson]])
    """Rollout id → call id → lesson for the policy that answered the call."""
    air: Mapping[str, Sequence[Reward]] = field(default_factory=dict[str, Sequence[Reward]])
    """Attempt → rewards by the recipe's AIR rules."""
    policies: Mapping[str, PolicyStep] = field(default_factory=dict[str, PolicyStep])
    unknown: str | None = None
    """Why the lessons of a policy, or of all, are not known; None: all of them are."""

    @property
    def size(self) -> int:
        """Bytes of the token ids."""
        return sum(
            call.prompt_ids.nbytes + call.completion_ids.nbytes
            for policy in self.policies.values()
            for trajectory in policy.trajectories.values()
            for call in trajectory.transitions
        )


@final
class Steps:
    """The steps that were computed last. A complete step is computed once."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Hashable, StepTaught]] = {}
        self._lock = asyncio.Lock()

    async def of(self, step: int, *, state: Hashable, make: Callable[[], Awaitable[StepTaught]]) -> StepTaught:
        """The step, which is made if it is not known in this `state`."""
        async with self._lock:
            known = self._kept.pop(step, None)
            if known is None or known[0] != state:
                known = (state, await make())
            self._kept[step] = known
            sizes = {number: kept.size for number, (_, kept) in self._kept.items()}
            for number in list(self._kept)[:-1]:
                if sum(sizes.values()) > MOST_BYTES:
                    del self._kept[number], sizes[number]
            return known[1]


async def state_of(records: Records, config: Config, *, folder: Path, step: int, learnt: bool) -> Hashable:
    """Equal as long as the step's records are the same. Those of a complete step do not change."""
    files = [taught_file(folder, step=step, policy=name) for name in config.learners()]
    changes = None if learnt else (await records.changes()).cursor
    return learnt, changes, tuple(file.is_file() for file in files)


async def step_taught(records: Records, config: Config, *, folder: Path, step: int, learnt: bool) -> StepTaught:
    """Read all records of a step, which counts from 0. `learnt`: whether the step is complete."""
    names = {learner.algorithm.reward for learner in config.learners().values()}
    batch = await step_batch(records, step, names=names)
    accepted = accepted_attempts(batch)
    try:
        calls, air = await _read(records, config, accepted)
        rewards = await records.rewards(accepted)
        return await asyncio.to_thread(
            _computed, config, batch, calls, rewards, air, folder=folder, step=step, learnt=learnt
        )
    except LightningError as error:
        return StepTaught(unknown=f"its advantages cannot be recomputed: {error.message}")


async def _read(records: Records, config: Config, attempt_ids: Sequence[str]) -> tuple[list[Call], list[Reward]]:
    """The calls without their requests and responses, which need most memory and which learning never reads; and the
    AIR rewards, which follow from those.
    """
    calls: list[Call] = []
    air: list[Reward] = []
    for start in range(0, len(attempt_ids), TOGETHER):
        some = attempt_ids[start : start + TOGETHER]
        whole = await records.calls(some)
        if config.air:
            air += await asyncio.to_thread(air_of, config, await records.spans(some), whole)
        calls += [replace(call, request={}, response={}) for call in whole]
    return calls, air


def _computed(
    config: Config,
    batch: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    air: Sequence[Reward],
    *,
    folder: Path,
    step: int,
    learnt: bool,
) -> StepTaught:
    lessons: dict[str, dict[str, Lesson]] = {}
    policies: dict[str, PolicyStep] = {}
    unknown: str | None = None
    for name, learner in config.learners().items():
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
        taught, unreadable = _recorded(folder, step, name)
        valued = _with_values(trajectories, learner, taught)
        if valued is None:
            when = "older versions did not record them" if learnt else "they are recorded when the step is complete"
            unknown = f"its credit needs the critic's values; {unreadable or when}"
            continue
        made, _ = lessons_of(valued, learner.algorithm, root=config.root)
        own = frozenset(call.id for call in calls if call.policy == name)
        for lesson in made:
            if lesson.transition.call_id in own:
                lessons.setdefault(lesson.rollout_id, {})[lesson.transition.call_id] = lesson
        policies[name] = PolicyStep(
            algorithm=learner.algorithm,
            own=own,
            trajectories={trajectory.rollout_id: trajectory for trajectory in valued},
            accounts=accounts_of(valued, learner.algorithm, root=config.root),
            taught=taught,
            unreadable=unreadable,
        )
    return StepTaught(lessons=lessons, air=by_attempt(air), policies=policies, unknown=unknown)


def _recorded(folder: Path, step: int, policy: str) -> tuple[Taught | None, str | None]:
    """(what was recorded beside the step, why it cannot be read)"""
    try:
        return taught_of(folder, step, policy), None
    except UserError as error:
        return None, error.message


def _with_values(
    trajectories: Sequence[Trajectory], learner: LearnerConfig, taught: Taught | None
) -> Sequence[Trajectory] | None:
    """The trajectories with the values that the critic gave, if the credit needs them; None: they are not recorded."""
    if learner.algorithm.credit != "gae_calls":
        return trajectories
    values = {} if taught is None else taught.values
    calls = [call for trajectory in trajectories for call in trajectory.transitions if call.left_out is None]
    if any(call.call_id not in values for call in calls):
        return None
    return [
        replace(t, transitions=tuple(replace(call, value=values.get(call.call_id)) for call in t.transitions))
        for t in trajectories
    ]


def air_of(config: Config, spans: Sequence[Span], calls: Sequence[Call]) -> list[Reward]:
    return air_rewards(united(spans, spans_of(calls)), config.air, root=config.root) if config.air else []


async def step_batch(records: Records, step: int, *, names: set[str]) -> list[Rollout]:
    """The rollouts that a step learns from, branches last. Dynamic sampling replaces silent groups. The order is as in
    `Rollouts.collect`, so that sums over the batch are the same bit for bit.
    """
    rounds: dict[int, list[Rollout]] = {}
    for rollout in await records.rollouts(where=Where(prefix=f"train-{step:05d}-")):
        found = TRAINED.match(rollout.id)
        rounds.setdefault(int(found["retry"] or 0) if found else 0, []).append(rollout)
    batch = rounds.pop(0, [])
    for retry in sorted(rounds):
        rewards = await records.rewards(accepted_attempts(batch))
        silent = silent_groups(batch, rewards, names=names)
        batch = [rollout for rollout in batch if rollout.group_id not in silent] + rounds[retry]
    return sorted(batch, key=lambda rollout: rollout.branch is not None)
