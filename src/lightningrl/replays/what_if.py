"""What if the model had answered otherwise at one call? The recorded ending, beside those of other answers.

The agent gets the recorded answers up to that call. There it gets the user's answer or a sampled one, and then goes on
with answers that are sampled afresh.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightningrl.branches import VOID, is_branching, played_back
from lightningrl.data.intervals import clustered_mean
from lightningrl.data.tasks import derived_seed
from lightningrl.engine.base import Engine
from lightningrl.look.conversation import conversation, plain
from lightningrl.messages import Message
from lightningrl.replays.given import UNANSWERED, given
from lightningrl.replays.recording import Course, Recording, first_line
from lightningrl.replays.replay import Ending, ending
from lightningrl.replays.serving import Doing, again, no_engines, staged, template_of
from lightningrl.replays.weights import engines_of, folders_of
from lightningrl.types import Branch, Call, Rollout

Engines: TypeAlias = Mapping[str, Engine]
"""Policy → the engine that answers for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call that is not played back."""

    number: int
    """From 1, in order of arrival."""
    agent: str
    asked: tuple[Message, ...]
    """The messages that its request adds, e.g. the result of a tool."""
    answer: Message | None
    """None: it was not answered."""

    def as_json(self) -> dict[str, Any]:
        answer = None if self.answer is None else plain(self.answer)
        return {
            "call": self.number,
            "agent": self.agent,
            "asked": [plain(message) for message in self.asked],
            "answer": answer,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the agent went on from the place."""

    answer: Message | None
    """The answer at the place; None: it never got there."""
    turns: tuple[Turn, ...]
    """The calls that are not played back: that at the place, and those that may follow from it."""
    ending: Ending
    void: str | None
    """Why it says nothing about the place: it went another way before; None: it does."""
    stopped: int | None
    """Number of the call that nothing answered, as there is no engine; None: there is none."""

    @property
    def reward(self) -> float | None:
        return None if self.void is not None or self.stopped is not None else self.ending.reward

    def as_json(self) -> dict[str, Any]:
        return {
            "answer": None if self.answer is None else plain(self.answer),
            "turns": [turn.as_json() for turn in self.turns],
            **asdict(self.ending),
            "reward": self.reward,
            "void": self.void,
            "stopped": self.stopped,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The recorded way and others, which share everything before one call."""

    rollout: str
    task: str
    attempt: str
    call: int
    """Number of the call at the place, from 1."""
    recorded: Way
    others: tuple[Way, ...]
    greedy: bool
    """The answers were recorded at temperature 0, and are sampled at 1."""

    @property
    def rewards(self) -> list[float]:
        """The rewards of the others, as far as they have one."""
        return [way.reward for way in self.others if way.reward is not None]

    @property
    def mean(self) -> tuple[float, float | None] | None:
        """Mean reward of the others, and half of its 95 % interval (Student); None: no reward, or a single one."""
        rewards = np.array(self.rewards, np.float64)
        if not len(rewards):
            return None
        interval = clustered_mean(rewards, np.arange(len(rewards), dtype=np.int32))
        return float(rewards.mean()), None if interval is None else (interval[1] - interval[0]) / 2

    def as_json(self) -> dict[str, Any]:
        mean = self.mean
        return {
            "rollout": self.rollout,
            "task": self.task,
            "attempt": self.attempt,
            "call": self.call,
            "recorded": self.recorded.as_json(),
            "others": [way.as_json() for way in self.others],
            "mean": None if mean is None else mean[0],
            "interval": None if mean is None else mean[1],
        }


async def answer_otherwise(
    run: Recording, trunk: Course, place: Call, answer: Any, *, checkpoint: Path | None, engine: bool, doing: Doing
) -> WhatIf:
    """Give this answer at the place. `answer`: as scripts return it. Without an `engine`, the agent stops at its first
    call after that whose answer is not recorded.
    """
    rollout = _branch(run, trunk, place, number=1)
    return await _ways(run, trunk, place, [rollout], answer=answer, checkpoint=checkpoint, engine=engine, doing=doing)


async def sample(
    run: Recording, trunk: Course, place: Call, *, samples: int, checkpoint: Path | None, doing: Doing
) -> WhatIf:
    """Sample so many answers at the place, and everything after it."""
    rollouts = [_branch(run, trunk, place, number=number) for number in range(1, samples + 1)]
    seeded = [_seeded(rollout, derived_seed(run.config.seed, rollout.id)) for rollout in rollouts]
    return await _ways(run, trunk, place, seeded, answer=None, checkpoint=checkpoint, engine=True, doing=doing)


async def _ways(
    run: Recording,
    trunk: Course,
    place: Call,
    rollouts: Sequence[Rollout],
    *,
    answer: Any,
    checkpoint: Path | None,
    engine: bool,
    doing: Doing,
) -> WhatIf:
    template = template_of(run)
    async with AsyncExitStack() as stack:
        engines: Engines = no_engines(run.config)
        if engine:
            folders = await folders_of(run, trunk, place, checkpoint=checkpoint)
            doing(f"loading the weights that answered, `{folders[place.policy]}`", 0, 0)
            engines = await stack.enter_async_context(engines_of(folders, run, template))
        if answer is not None:
            otherwise = engines[place.policy]
            engines = {**engines, place.policy: given(answer, place=place, template=template, otherwise=otherwise)}
        stage = await stack.enter_async_context(staged(run, template, engines=engines, doing=doing))
        await stage.run(rollouts, what="running the agent")
        found = await stage.courses([rollout.id for rollout in rollouts])
    branch = Branch(attempt_id=trunk.attempt.id, call_id=place.id)
    repeated = {call.id for call in played_back(trunk.calls, branch)}
    return WhatIf(
        rollout=trunk.rollout.id,
        task=trunk.rollout.task.id,
        attempt=trunk.attempt.id,
        call=place.index + 1,
        recorded=_way(trunk, place, fresh=[call.id for call in trunk.calls if call.id not in repeated]),
        others=tuple(
            _way(course, place, fresh=[call.id for call in course.calls if call.replays is None]) for course in found
        ),
        greedy=answer is None and trunk.rollout.sampling.get("temperature") == 0,
    )


def _branch(run: Recording, trunk: Course, place: Call, *, number: int) -> Rollout:
    """The rollout that parts from the trunk at the place, with the id that it would have in training."""
    branch = Branch(attempt_id=trunk.attempt.id, call_id=place.id)
    rollout = again(trunk.rollout, branch=branch, timeout_s=run.config.agent.timeout_s)
    return replace(rollout, id=f"{rollout.id}-at{place.index + 1:02d}-{number}")


def _seeded(rollout: Rollout, seed: int) -> Rollout:
    """With randomness of its own: one sampled greedily would get the same answer again."""
    temperature = rollout.sampling.get("temperature") or 1.0
    return replace(rollout, sampling={**rollout.sampling, "temperature": temperature, "seed": seed})


def _way(course: Course, place: Call, *, fresh: Sequence[str]) -> Way:
    said = dict(zip((call.id for call in course.calls), conversation(course.calls), strict=True))
    at = next((call for call in course.calls if call.id in fresh and is_branching(call, place)), None)
    stopped = next((call for call in course.calls if call.capture_reason == UNANSWERED), None)
    error = first_line(course.attempt.error)
    return Way(
        answer=None if at is None else said[at.id].answer,
        turns=tuple(
            Turn(number=call.index + 1, agent=call.agent, asked=said[call.id].messages, answer=said[call.id].answer)
            for call in course.calls
            if call.id in fresh
        ),
        ending=ending(course),
        void=error.removeprefix(VOID) if error is not None and error.startswith(VOID) else None,
        stopped=None if stopped is None else stopped.index + 1,
    )
