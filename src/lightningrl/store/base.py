"""What a store promises: acknowledged means durable, records are only added, and a restart finds everything.

A coroutine that returns has committed. `:memory:` is the test double; there is no second implementation for tests.
Eight verbs read (`Records`) and eight write (`Store`); `lightningrl.store.conformance` is the suite that every store
passes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightningrl import plugins
from lightningrl.types import Attempt, AttemptStatus, Call, Reward, Rollout, RolloutStatus, Span, Weights

ENDED: tuple[RolloutStatus, ...] = ("succeeded", "failed")

LOOK_S = 60.0
"""How long one `changes` waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A filter for rollouts. Every field that is given must hold."""

    prefix: str = ""
    """What the rollout's id begins with."""
    split: str | None = None
    status: RolloutStatus | None = None
    text: str = ""
    """Text in the task's id or in its input, which is searched as JSON. ASCII letters match in either case."""
    reward: tuple[float, float] | None = None
    """Least and greatest final reward of the accepted attempt; both are included."""


ANY = Where()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Rollouts whose status has changed, the earliest change first, each once with its present status."""

    cursor: int
    """Pass it to the next `changes`."""
    rollouts: tuple[Rollout, ...]


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
        """Rollouts in the order they were enqueued: those with these ids or in these groups, or else all that `where`
        lets through.

        `limit` keeps the latest so many, of those enqueued before the rollout `before` if it is given.
        """
        ...

    async def count(self, where: Where = ANY) -> Mapping[RolloutStatus, int]:
        """How many rollouts have each status. A status without any is left out."""
        ...

    async def changes(self, after: int | None = None, *, timeout_s: float = 0.0) -> Changes:
        """Rollouts whose status has changed after the cursor `after`, at most 500. New rollouts count as changed.

        Waits up to `timeout_s` until there are any, also for changes by other processes. `after=None` gives the present
        cursor, at once.
        """
        ...

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """Every attempt at these rollouts, in order of number."""
        ...

    async def calls(self, attempt_ids: Sequence[str]) -> list[Call]:
        """Calls with their whole prompts, ordered by attempt as asked, then by index."""
        ...

    async def rewards(self, attempt_ids: Sequence[str]) -> list[Reward]: ...

    async def spans(self, attempt_ids: Sequence[str]) -> list[Span]:
        """Spans that telemetry recorded, ordered by attempt as asked, then by time.

        Spans that follow from calls are not stored: see `tracing.spans_of`.
        """
        ...

    async def weights(self, policy: str) -> Weights | None:
        """The latest published version; None if there is none."""
        ...

    async def close(self) -> None: ...


class Store(Records, Protocol):
    """`Records`, and the verbs that write."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Ask for executions. A rollout whose id is known is left as it is, unless it has failed: then it gets
        `max_attempts` more tries.
        """
        ...

    async def claim(self, worker: str, *, limit: int, lease_s: float) -> list[tuple[Rollout, Attempt]]:
        """Take up to `limit` queued rollouts, oldest first, each with a new running attempt. Never hands one out twice.

        Attempts whose lease has passed become `lost` first, and their rollouts are queued again or fail.
        A lost attempt does not count against `max_attempts`, up to 10 of them.
        """
        ...

    async def heartbeat(self, attempt_ids: Sequence[str], *, lease_s: float) -> None:
        """Prolong the leases of running attempts."""
        ...

    async def finish(
        self,
        attempt_id: str,
        status: AttemptStatus,
        *,
        rewards: Sequence[Reward] = (),
        output: object = None,
        error: str | None = None,
    ) -> None:
        """End an attempt, together with its rewards, in one transaction.

        The first `succeeded` attempt is accepted and ends its rollout. Otherwise the rollout is queued again while
        attempts are left. Finishing an attempt that has ended already changes nothing (the first word counts).
        """
        ...

    async def append(self, *records: Call | Reward | Span) -> None:
        """Add records. Refuses a reward that is not finite, and any record for an attempt that has ended.

        Spans are late by nature: they are taken until five minutes after the end. One whose id its trace has already
        changes nothing.
        """
        ...

    async def attempt_by_token(self, token: str) -> tuple[Rollout, Attempt] | None:
        """Whose key is this? None if nobody's.

        Asked for every request. It never calls an attempt running that was ended here; what another process did is
        known within a second.
        """
        ...

    async def publish(self, weights: Weights) -> None:
        """Make a version known. Publishing the same version again changes nothing."""
        ...


async def open_store(url: str, *, exclusive: bool = False) -> Store:
    """Open `sqlite:///absolute/path`, `sqlite://relative/path`, `sqlite:///:memory:`, or any other store (`scheme` is
    the plugin's name).

    `exclusive` says that this process alone runs attempts: those that a dead predecessor left running are lost at once.
    """
    scheme, _, path = url.partition("://")
    return await plugins.load(scheme, kind="store").open(
        path.removeprefix("/") if path.startswith("/:") else path, exclusive=exclusive
    )


async def open_records(url: str) -> Records:
    """Open a store that exists for reading alone: nothing is created, locked or migrated, and a run that writes to it
    meanwhile is not slowed.
    """
    scheme, _, path = url.partition("://")
    return await plugins.load(scheme, kind="store").read(path)


async def wait(
    store: Records,
    rollout_ids: Sequence[str],
    *,
    timeout_s: float = math.inf,
    progress: Callable[[int], None] = lambda ended: None,
) -> list[Rollout]:
    """Return as soon as all of these rollouts have succeeded or failed, or when the time is up; return those that have
    ended.

    `progress` is called with the number that has ended, first at once and then whenever rollouts have changed.
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
