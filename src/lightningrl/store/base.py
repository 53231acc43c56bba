"""What a store promises: acknowledged means durable, records are only added, and a restart finds everything.

A coroutine that returns has committed. `:memory:` is the test double; there is no second implementation for tests.
`Records` are the verbs that read, `Store` adds those that write. Every store passes `lightningrl.store.conformance`.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lightningrl import plugins
from lightningrl.types import Attempt, AttemptStatus, Call, Reward, Rollout, RolloutStatus, Span, Weights

ENDED: tuple[RolloutStatus, ...] = ("succeeded", "failed")

LOOK_S = 60.0
"""Seconds that one `changes` of `wait` waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A filter for rollouts. All given fields must hold."""

    prefix: str = ""
    """The beginning of the rollout's id."""
    split: str | None = None
    status: RolloutStatus | None = None
    text: str = ""
    """Text in the task's id or in the JSON of its input. ASCII letters match in either case."""
    reward: tuple[float, float] | None = None
    """Lowest and highest final reward of the accepted attempt, both inclusive."""


ANY = Where()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Rollouts whose status has changed, each once with its present status, the earliest change first."""

    cursor: int
    """Pass it to the next `changes`."""
    rollouts: tuple[Rollout, ...]


class Outcome(NamedTuple):
    """How one rollout stands. What is not of the rollout is of its accepted attempt, or else of its latest."""

    place: int
    """Its place in the queue: later rollouts have larger numbers."""
    id: str
    group_id: str
    task_id: str
    split: str
    status: RolloutStatus
    attempts: int
    attempt_status: AttemptStatus | None
    """None: no attempt has begun."""
    worker: str
    started_at: float | None
    """Unix seconds; None: no attempt has begun."""
    ended_at: float | None
    """Unix seconds; None: it has not ended."""
    error: str | None
    """The first line; None: no error."""
    reward: float | None
    """The final reward of the accepted attempt; None: it has none. If there are several, the grader's counts."""
    calls: int
    sampled_tokens: int
    """Without those of played-back calls: they were sampled in the trunk."""
    branch: bool = False
    """Whether the rollout is a branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """A page of outcomes."""

    cursor: int
    """Pass it to the next `outcomes`, in the same direction."""
    rows: tuple[Outcome, ...]


class Records(Protocol):
    """The verbs that read. `open_records` gives these alone."""

    async def rollouts(
        self,
        *,
        ids: Sequence[str] | None = None,
        group_ids: Sequence[str] | None = None,
        where: Where = ANY,
        before: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        """Rollouts in queue order, with these ids or in these groups; without either, all that pass `where`.

        `before` keeps those enqueued before that rollout, then `limit` keeps the latest ones.
        """
        ...

    async def count(self, where: Where = ANY) -> Mapping[RolloutStatus, int]:
        """Number of rollouts by status. A status without rollouts is left out."""
        ...

    async def changes(self, after: int | None = None, *, timeout_s: float = 0.0) -> Changes:
        """Rollouts whose status has changed since the cursor `after`, at most 500. New rollouts count as changed.

        Waits up to `timeout_s` for a change, also by another process. `after=None` returns the present cursor at once.
        """
        ...

    async def outcomes(self, *, after: int | None = None, before: int | None = None, limit: int = 2000) -> Outcomes:
        """Up to `limit` outcomes, read without their calls. One of `after` and `before` is a cursor of `changes`.

        `after`: rollouts whose status has changed since then, and all that run, as their calls grow.
        `before`: rollouts whose status has not changed since then, the latest change first. No rows: there are no more.
        """
        ...

    async def places(self, where: Where) -> list[int]:
        """`Outcome.place` of all rollouts that pass `where`."""
        ...

    async def said(self, text: str, *, places: Sequence[int]) -> dict[int, str]:
        """Place → a few words around the first `text` in what was said, for those of these rollouts that have it.

        Searches the requests and responses of all calls of the accepted, or else of the latest attempt. ASCII letters
        match in either case. Takes about 20 us a call.
        """
        ...

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """Every attempt at these rollouts, in order of number."""
        ...

    async def calls(self, attempt_ids: Sequence[str]) -> list[Call]:
        """Calls with their whole prompts, in the order of `attempt_ids`, then by index."""
        ...

    async def rewards(self, attempt_ids: Sequence[str]) -> list[Reward]: ...

    async def spans(self, attempt_ids: Sequence[str]) -> list[Span]:
        """Spans that telemetry recorded, in the order of `attempt_ids`, then by start.

        Spans derived from calls are not stored: see `tracing.spans_of`.
        """
        ...

    async def weights(self, policy: str) -> Weights | None:
        """The latest published version; None if no version was published."""
        ...

    async def close(self) -> None: ...


class Store(Records, Protocol):
    """`Records`, and the verbs that write."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Request executions. A rollout with a known id is left as it is, unless it has failed: then it gets
        `max_attempts` more attempts.
        """
        ...

    async def claim(
        self,
        worker: str,
        *,
        limit: int,
        lease_s: float,
        labels: Collection[str] = (),
        holding: Collection[str] | None = None,
        gateway: str = "",
    ) -> list[tuple[Rollout, Attempt]]:
        """Take up to `limit` queued rollouts, oldest first, each with a new running attempt. No rollout is given twice.
        Rollouts that ask for other labels than `labels` are passed over. `gateway` will answer the attempts' calls.

        Before that, attempts whose lease has passed become `lost`, and their rollouts are queued again or fail. So do
        attempts of this worker and gateway that are not in `holding`: the ids of all attempts that the worker runs.
        None: unknown. Up to 10 lost attempts of a rollout do not count against `max_attempts`.
        """
        ...

    async def heartbeat(self, attempt_ids: Sequence[str], *, lease_s: float, worker: str | None = None) -> set[str]:
        """Extend the leases of running attempts to `lease_s` from now, and return their ids.

        `worker`: only those of this worker.
        """
        ...

    async def finish(
        self,
        attempt_id: str,
        status: AttemptStatus,
        *,
        rewards: Sequence[Reward] = (),
        output: object = None,
        error: str | None = None,
        worker: str | None = None,
    ) -> None:
        """End an attempt, and store its rewards, in one transaction.

        The first `succeeded` attempt is accepted and ends its rollout. Otherwise the rollout is queued again while it
        has attempts left. Finishing an attempt that has ended changes nothing: the first `finish` counts. Nor does
        finishing an attempt that is not this `worker`'s, if one is given.
        """
        ...

    async def append(self, *records: Call | Reward | Span) -> None:
        """Add records. Raises `StoreError` for a reward that is not finite, and for a record of an ended attempt.

        Spans may arrive late: they are taken until five minutes after the end. A span that is stored already (same
        trace, same id) changes nothing.
        """
        ...

    async def attempt_by_token(self, token: str) -> tuple[Rollout, Attempt] | None:
        """The rollout and attempt that this token belongs to; None if it belongs to none.

        Called for every request. An attempt that this process has ended is never returned as running. Changes by
        another process are seen within a second.
        """
        ...

    async def publish(self, weights: Weights) -> None:
        """Record a version of a policy. Publishing the same version again changes nothing."""
        ...


async def open_store(url: str, *, exclusive: bool = False) -> Store:
    """Open `sqlite:///absolute/path`, `sqlite://relative/path`, `sqlite:///:memory:`, or a plugin's store; the
    scheme is the plugin's name.

    `exclusive`: no other process gives out attempts.
    """
    scheme, _, path = url.partition("://")
    name = path.removeprefix("/") if path.startswith("/:") else path
    return await plugins.load(scheme, kind="store").open(name, exclusive=exclusive)


async def open_records(url: str) -> Records:
    """Open an existing store to read. Nothing is created, locked or migrated, and a run that writes is not slowed."""
    scheme, _, path = url.partition("://")
    return await plugins.load(scheme, kind="store").read(path)


async def wait(
    store: Records,
    rollout_ids: Sequence[str],
    *,
    timeout_s: float = math.inf,
    progress: Callable[[int], None] = lambda ended: None,
) -> list[Rollout]:
    """Wait until all of these rollouts have succeeded or failed, or until the timeout. Returns those that have ended.

    `progress` is called with the number of ended rollouts: first at once, then after every change.
    """
    deadline = time.monotonic() + timeout_s
    cursor = (await store.changes()).cursor
    pending = {rollout.id for rollout in await store.rollouts(ids=rollout_ids) if rollout.status not in ENDED}
    progress(len(rollout_ids) - len(pending))
    while pending and (left := deadline - time.monotonic()) > 0:
        news = await store.changes(cursor, timeout_s=min(left, LOOK_S))
        cursor = news.cursor
        pending.difference_update(rollout.id for rollout in news.rollouts if rollout.status in ENDED)
        progress(len(rollout_ids) - len(pending))
    return [rollout for rollout in await store.rollouts(ids=rollout_ids) if rollout.status in ENDED]
