"""Which rollouts are there, and how did they go? One line for each, with its conversation where that is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightningrl.look.census import CAPTURES, Census, Reason
from lightningrl.look.conversation import Said, conversation
from lightningrl.look.opened import Opened
from lightningrl.look.rollout import final_rewards
from lightningrl.store import Records, Where
from lightningrl.types import Attempt, Rollout, RolloutStatus

BATCH = 64
"""Rollouts whose calls are in memory together."""
ERRORS = 1000
"""Failed rollouts whose errors are counted, the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rollout."""

    id: str
    task: str
    split: str
    status: RolloutStatus
    attempts: int
    calls: int
    """Of the attempt that was accepted, or else the latest; so are tokens, reward and error."""
    sampled_tokens: int
    reward: float | None
    """None: there is none (yet)."""
    seconds: float | None
    """None: it has not ended."""
    error: str | None
    """Its first line."""
    output: Any
    """JSON: what the agent returned."""
    conversation: tuple[Said, ...] | None
    """Of each call; None if it was not asked for."""

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {
            "conversation": None if self.conversation is None else [said.as_json() for said in self.conversation]
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The rollouts of a store that were asked for."""

    path: Path
    lines: tuple[Line, ...]
    """The latest of them, in the order they were enqueued."""
    counts: Mapping[RolloutStatus, int]
    """All of them, by status."""
    errors: Mapping[str, tuple[int, str]]
    """First line of an error → how many of the latest failed rollouts have it, and the id of one."""
    census: Census | None
    """Over every attempt at them, accepted or not; None if it was not asked for."""

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "store": str(self.path),
            "counts": dict(self.counts),
            "rollouts": [line.as_json() for line in self.lines],
        }
        return found if self.census is None else {**found, "report": _census_json(self.census)}


async def list_rollouts(
    run: Opened,
    *,
    where: Where,
    before: str | None = None,
    limit: int | None = None,
    report: bool = False,
    conversations: bool = False,
) -> Listing:
    """The latest `limit` rollouts that `where` lets through. `report` counts calls, which reads all of them."""
    records = run.records
    rollouts = await records.rollouts(where=where, before=before, limit=limit)
    lines: list[Line] = []
    for start in range(0, len(rollouts), BATCH):
        lines += await _lines(records, rollouts[start : start + BATCH], conversations=conversations)
    return Listing(
        path=run.file,
        lines=tuple(lines),
        counts=await records.count(where),
        errors=await _errors(records, where),
        census=await _census(records, where) if report else None,
    )


async def _lines(records: Records, rollouts: Sequence[Rollout], *, conversations: bool) -> list[Line]:
    tries: dict[str, list[Attempt]] = {rollout.id: [] for rollout in rollouts}
    for attempt in await records.attempts(list(tries)):
        tries[attempt.rollout_id].append(attempt)
    rewards = await final_rewards(records, rollouts)
    return [
        await _line(records, rollout, tries[rollout.id], rewards[rollout.id], conversations=conversations)
        for rollout in rollouts
    ]


async def _line(
    records: Records, rollout: Rollout, tries: Sequence[Attempt], reward: float | None, *, conversations: bool
) -> Line:
    accepted = next((attempt for attempt in tries if attempt.id == rollout.accepted_attempt_id), None)
    told = accepted or (tries[-1] if tries else None)
    calls = await records.calls([told.id]) if told else []
    return Line(
        id=rollout.id,
        task=rollout.task.id,
        split=rollout.task.split,
        status=rollout.status,
        attempts=len(tries),
        calls=len(calls),
        sampled_tokens=sum(len(call.completion_ids) for call in calls),
        reward=reward,
        seconds=round(told.ended_at - told.started_at, 3) if told and told.ended_at else None,
        error=_first_line(told.error) if told else None,
        output=told.output if told else None,
        conversation=tuple(conversation(calls)) if conversations else None,
    )


async def _census(records: Records, where: Where) -> Census:
    """A page at a time: the calls of a whole run need not fit into memory."""
    census, before = Census(), None
    while page := await records.rollouts(where=where, before=before, limit=BATCH):
        for attempt in await records.attempts([rollout.id for rollout in page]):
            census.add(await records.calls([attempt.id]))
        before = page[0].id
    return census


async def _errors(records: Records, where: Where) -> dict[str, tuple[int, str]]:
    """The most frequent first. A filter by reward finds only rollouts that succeeded."""
    failed = await records.rollouts(where=replace(where, status="failed"), limit=ERRORS)
    last = {attempt.rollout_id: attempt for attempt in await records.attempts([rollout.id for rollout in failed])}
    found: dict[str, list[str]] = {}
    for rollout_id, attempt in last.items():
        if line := _first_line(attempt.error):
            found.setdefault(line, []).append(rollout_id)
    return {line: (len(ids), ids[0]) for line, ids in sorted(found.items(), key=lambda item: -len(item[1]))}


def _first_line(error: str | None) -> str | None:
    return error.splitlines()[0] if error else None


def _census_json(census: Census) -> dict[str, Any]:
    def reasons(of: Mapping[str, Reason]) -> dict[str, Any]:
        return {why: {"calls": reason.calls, "example": reason.example} for why, reason in of.items()}

    return {
        "calls": census.calls,
        **{capture: census.captures[capture] for capture in CAPTURES},
        "partly_reasons": reasons(census.partly_reasons),
        "fork_reasons": reasons(census.fork_reasons),
        "incomplete_reasons": reasons(census.incomplete_reasons),
        "agents": census.agents,
        "dialects": census.dialects,
        "policies": census.policies,
        "fingerprints": {
            name: {
                "calls": role.calls,
                "sampled_tokens": role.sampled_tokens,
                "system": role.system,
                "tools": role.tools,
                "agents": role.agents,
            }
            for name, role in census.roles.items()
        },
        "sampled_tokens": census.sampled_tokens,
        "prompt_tokens": census.prompt_tokens,
        "reused_tokens": census.reused_tokens,
    }
