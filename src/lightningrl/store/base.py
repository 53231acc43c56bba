"""What a store promises: acknowledged means durable, records are only added, and a restart finds everything.

A coroutine that returns has committed. `:memory:` is the test double; there is no second implementation for tests.
"""

from collections.abc import Sequence
from typing import Protocol

from lightningrl import plugins
from lightningrl.types import Attempt, AttemptStatus, Call, Reward, Rollout, Span, Weights


class Store(Protocol):
    """Fifteen verbs: to add is one for all records, to read is one for each kind.

    `lightningrl.store.conformance` is the suite that every implementation passes.
    """

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Ask for executions. A rollout whose id is known is left as it is, unless it has failed: then it gets `max_attempts` more tries."""
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

        The first `succeeded` attempt is accepted and ends its rollout. Otherwise the rollout is queued again while attempts are left.
        Finishing an attempt that has ended already changes nothing (the first word counts).
        """
        ...

    async def append(self, *records: Call | Reward | Span) -> None:
        """Add records. Refuses a reward that is not finite, and any record for an attempt that has ended.

        Spans are late by nature: they are taken until five minutes after the end. One whose id its trace has already changes nothing.
        """
        ...

    async def attempt_by_token(self, token: str) -> tuple[Rollout, Attempt] | None:
        """Whose key is this? None if nobody's.

        Asked for every request. It never calls an attempt running that was ended here; what another process did is known within a second.
        """
        ...

    async def rollouts(self, *, ids: Sequence[str] | None = None, group_ids: Sequence[str] | None = None) -> list[Rollout]:
        """Rollouts by id or by group (all, if neither is given), in the order they were enqueued."""
        ...

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """Every attempt at these rollouts, in order of number."""
        ...

    async def calls(self, attempt_ids: Sequence[str]) -> list[Call]:
        """Calls with their whole prompts, ordered by attempt as asked, then by index."""
        ...

    async def rewards(self, attempt_ids: Sequence[str]) -> list[Reward]: ...

    async def spans(self, attempt_ids: Sequence[str]) -> list[Span]:
        """What telemetry has told, ordered by attempt as asked, then by time. Those that follow from calls are not kept (`tracing.spans_of`)."""
        ...

    async def wait(self, rollout_ids: Sequence[str], *, timeout_s: float) -> list[Rollout]:
        """Return as soon as all of them have succeeded or failed, or when the time is up. Returns those that have ended."""
        ...

    async def publish(self, weights: Weights) -> None:
        """Make a version known. Publishing the same version again changes nothing."""
        ...

    async def weights(self, policy: str) -> Weights | None:
        """The latest published version; None if there is none."""
        ...

    async def close(self) -> None: ...


async def open_store(url: str, *, exclusive: bool = False) -> Store:
    """Open `sqlite:///absolute/path`, `sqlite://relative/path`, `sqlite:///:memory:`, or any other store (`scheme` is the plugin's name).

    `exclusive` says that this process alone runs attempts: those that a dead predecessor left running are lost at once.
    """
    scheme, _, path = url.partition("://")
    return await plugins.load(scheme, kind="store").open(path.removeprefix("/") if path.startswith("/:") else path, exclusive=exclusive)
