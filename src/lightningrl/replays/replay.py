"""Does the agent go the same way again on its recorded answers? One rollout, or all that succeeded."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightningrl.errors import UserError
from lightningrl.look.logs import Logs
from lightningrl.replays.comparison import Parting, parting
from lightningrl.replays.recording import Course, Recording, courses
from lightningrl.replays.serving import Doing, again, no_engines, staged, template_of
from lightningrl.store import Where
from lightningrl.types import AttemptStatus, Branch, Rollout

COMPARED = 200
"""Attempts whose calls are in memory at once: with long prompts, those of a whole run would not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended."""

    status: AttemptStatus
    calls: int
    """Number of calls that were answered."""
    output: Any
    """JSON: what the agent returned or printed."""
    rewards: Mapping[str, float]
    """Of the attempt as a whole, by name."""
    reward: float | None
    """The final one; None: it has none."""
    error: str | None
    """One line of message, then the traceback; None: it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One recorded attempt, and how its agent went when it got the recorded answers again."""

    rollout: str
    task: str
    attempt: str
    """The recorded one."""
    recorded: Ending
    again: Ending
    parting: Parting | None
    """Where it went another way; None: nowhere."""
    printed: Logs | None = None
    """What the agent printed this time; None: nothing, or it was not asked for."""

    @property
    def same(self) -> bool:
        return self.parting is None

    def as_json(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """All replays of a run."""

    run: str
    overrides: Sequence[str]
    """The user's changes of the run's settings."""
    replays: tuple[Replayed, ...]
    seconds: float

    @property
    def parted(self) -> list[Replayed]:
        return [replay for replay in self.replays if replay.parting is not None]

    def groups(self) -> list[tuple[Parting, list[Replayed]]]:
        """The replays that parted, by call and kind of difference, the most frequent first. The first of each group is
        its example.
        """
        found: dict[tuple[int, str, str], list[Replayed]] = {}
        for replay in self.replays:
            if replay.parting is not None:
                key = (replay.parting.call or 0, replay.parting.kind, replay.parting.why)
                found.setdefault(key, []).append(replay)
        groups = [(group[0].parting, group) for group in found.values()]
        return sorted(((p, g) for p, g in groups if p is not None), key=lambda item: -len(item[1]))

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "replayed": len(self.replays),
            "same": len(self.replays) - len(self.parted),
            "parted": [
                {
                    "call": parting.call,
                    "kind": parting.kind,
                    "why": parting.why,
                    "example": parting.example,
                    "rollouts": [replay.rollout for replay in group],
                }
                for parting, group in self.groups()
            ],
            "seconds": round(self.seconds, 3),
        }


async def replay(run: Recording, trunk: Course, *, doing: Doing) -> Replayed:
    """Run the agent again on the answers of one attempt."""
    async with staged(run, template_of(run), engines=no_engines(run.config), doing=doing) as stage:
        await stage.run([_whole(run, trunk.rollout, attempt_id=trunk.attempt.id)], what="running the agent")
        [found] = await stage.courses([trunk.rollout.id])
        return replayed(trunk, found, printed=stage.printed(found))


async def replay_all(run: Recording, rollouts: Sequence[Rollout], *, doing: Doing) -> Regression:
    """Run the agent again on the answers of each rollout's accepted attempt, as many at a time as in training."""
    began = time.monotonic()
    repeated = [_whole(run, rollout, attempt_id=rollout.accepted_attempt_id or "") for rollout in rollouts]
    found: list[Replayed] = []
    async with staged(run, template_of(run), engines=no_engines(run.config), doing=doing) as stage:
        await stage.run(repeated, what="running the agent")
        for start in range(0, len(rollouts), COMPARED):
            part = rollouts[start : start + COMPARED]
            doing("comparing", start, len(rollouts))
            trunks, again = await courses(run.records, part), await stage.courses([rollout.id for rollout in part])
            found += [replayed(trunk, course) for trunk, course in zip(trunks, again, strict=True)]
    seconds = time.monotonic() - began
    return Regression(run=str(run.folder), overrides=run.overrides, replays=tuple(found), seconds=seconds)


async def succeeded(run: Recording, *, split: str | None, step: int | None, limit: int | None) -> list[Rollout]:
    """The rollouts to replay: all that succeeded, or the latest `limit`. `step`: of training, from 1."""
    prefix = "" if step is None else f"train-{step - 1:05d}-"
    where = Where(prefix=prefix, split=split, status="succeeded")
    found = await run.records.rollouts(where=where, limit=limit)
    if not found:
        asked = [f"step {step}"] if step is not None else []
        asked += [f"split `{split}`"] if split is not None else []
        what = f" of {' and '.join(asked)}" if asked else ""
        hint = f"`lightningrl rollouts {run.folder}` lists its rollouts"
        raise UserError(f"no rollout{what} has succeeded in `{run.folder}`", hint=hint)
    return found


def replayed(trunk: Course, again: Course, *, printed: Logs | None = None) -> Replayed:
    """The comparison of an attempt and its replay."""
    return Replayed(
        rollout=trunk.rollout.id,
        task=trunk.rollout.task.id,
        attempt=trunk.attempt.id,
        recorded=ending(trunk),
        again=ending(again),
        parting=parting(trunk, again),
        printed=printed,
    )


def ending(course: Course) -> Ending:
    attempt = course.attempt
    return Ending(
        status=attempt.status,
        calls=course.answered,
        output=attempt.output,
        rewards=course.rewards,
        reward=course.reward,
        error=attempt.error,
    )


def _whole(run: Recording, rollout: Rollout, *, attempt_id: str) -> Rollout:
    branch = Branch(attempt_id=attempt_id, call_id=None)
    return again(rollout, branch=branch, timeout_s=run.config.agent.timeout_s)
