"""A list of rollouts: one line each, with status, reward, error and, on request, the conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightningrl.look.census import Census
from lightningrl.look.conversation import Said, conversation
from lightningrl.look.opened import Opened
from lightningrl.look.rollout import final_rewards
from lightningrl.store import Records, Where
from lightningrl.types import Attempt, Rollout, RolloutStatus

BATCH = 64
"""Number of rollouts that are read together, to limit memory."""
ERRORS = 1000
"""Errors are counted over this many of the latest failed rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rollout."""

    id: str
    task: str
    split: str
    status: RolloutStatus
    attempts: int
    calls: int
    """Of the accepted attempt, or else of the latest one; the same holds for the fields below."""
    sampled_tokens: int
    reward: float | None
    """Final reward; None: it has none (yet)."""
    seconds: float | None
    """None: the attempt has not ended."""
    error: str | None
    """First line of the error; None: no error."""
    output: Any
    """What the agent returned, as JSON."""
    conversation: tuple[Said, ...] | None
    """One entry for each call; None if not requested."""

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        said = None if self.conversation is None else [said.as_json() for said in self.conversation]
        return fields | {"conversation": said}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The rollouts of a store that match a filter."""

    path: Path
    lines: tuple[Line, ...]
    """The latest ones, in the order they were enqueued."""
    counts: Mapping[RolloutStatus, int]
    """Status → number of matching rollouts; not only of `lines`."""
    errors: Mapping[str, tuple[int, str]]
    """First line of an error → (number of failed rollouts with it, id of one of them)."""
    census: Census | None
    """Counts over all attempts, accepted or not; None if not requested."""

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
    """The latest `limit` rollouts that match `where`. `report` also counts calls, which reads all of them."""
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
        sampled_tokens=sum(len(call.completion_ids) for call in calls if call.replays is None),
        reward=reward,
        seconds=round(told.ended_at - told.started_at, 3) if told and told.ended_at else None,
        error=_first_line(told.error) if told else None,
        output=told.output if told else None,
        conversation=tuple(conversation(calls)) if conversations else None,
    )


async def _census(records: Records, where: Where) -> Census:
    """Counts over all matching rollouts. They are read page by page, as a whole run may not fit into memory."""
    census, before = Census(), None
    while page := await records.rollouts(where=where, before=before, limit=BATCH):
        for attempt in await records.attempts([rollout.id for rollout in page]):
            census.add(await records.calls([attempt.id]))
        before = page[0].id
    return census


async def _errors(records: Records, where: Where) -> dict[str, tuple[int, str]]:
    """Errors of failed rollouts, most frequent first. Failed rollouts have no reward, so a reward filter finds none."""
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
    reasons = {
        "partly_reasons": census.partly_reasons,
        "fork_reasons": census.fork_reasons,
        "incomplete_reasons": census.incomplete_reasons,
    }
    roles = {name: {key: getattr(role, key) for key in role.__slots__} for name, role in census.roles.items()}
    return {
        **census.counts(),
        **{key: {why: asdict(reason) for why, reason in found.items()} for key, found in reasons.items()},
        "policies": census.policies,
        "fingerprints": roles,
    }
