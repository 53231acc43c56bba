"""Who runs which attempt? Workers claim attempts, say that they still run them, and finish them.

A worker holds an attempt by a lease. It renews the lease with heartbeats; if the lease passes, the attempt is lost, and
its rollout is queued again. A worker that has lost an attempt can neither finish nor reward it. `StoreLeases` serves
all workers of one server: the local one in its own process, and others over HTTP (`gateway/workers.py` and
`runner/remote.py`), which run attempts with the same `Dispatcher`.

The attempt of a branch that is void (`branches.py`) ends as failed and without rewards, whatever its agent returned.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from lightningrl.branches import VOID, why_void
from lightningrl.errors import LightningError
from lightningrl.store import Records, Store, Where
from lightningrl.types import Attempt, AttemptStatus, Branch, Reward, Rollout

LEASE_S = 60.0
WAIT_S = 30.0
"""Seconds that one `claim` waits for work."""
BACK_S = 30.0
"""Seconds in which workers come back to a server that was started again: they wait up to 5 s between two tries."""
CHECKS = 10
"""How often in the time of a lease is looked for leases that have passed."""

Claimed: TypeAlias = list[tuple[Rollout, Attempt]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    status: AttemptStatus
    output: Any = None
    """JSON: what the agent returned or printed."""
    rewards: tuple[Reward, ...] = ()
    error: str | None = None
    """One line that names the error and its owner, then the traceback. None if the attempt succeeded."""


class Leases(Protocol):
    """The attempts of one worker."""

    @property
    def lease_s(self) -> float:
        """Seconds without a heartbeat after which an attempt is lost."""
        ...

    async def claim(self, *, limit: int, holding: Collection[str]) -> Claimed:
        """Take up to `limit` attempts. Waits for work for a while; then returns none.

        `limit=0` returns at once.

        `holding`: all attempts that this worker runs or has not finished yet. Others that are leased to it are lost:
        the answer that named them has not arrived, or the process that ran them has died. A worker has one claim at a
        time; a second one takes the place of the first, which returns nothing.
        """
        ...

    async def heartbeat(self, holding: Collection[str]) -> Collection[str]:
        """Renew leases. Returns those that are still this worker's; the others have been lost or have ended."""
        ...

    async def finish(self, attempt_id: str, outcome: Outcome) -> None:
        """End an attempt. Changes nothing if it has ended, or is not this worker's any more."""
        ...


Grade: TypeAlias = Callable[[Rollout, Attempt, Outcome], Awaitable[Outcome]]
"""Grades an attempt whose agent has ended. Raises `LightningError` if its output cannot be graded."""


def never(began: float) -> bool:
    """The engine has not been down since `began`."""
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class _Claim:
    """A claim that waits for work."""

    worker: str
    labels: frozenset[str]
    limit: int
    given: asyncio.Future[Claimed]


class _Given(NamedTuple):
    """What is known of a rollout whose latest attempt was claimed here."""

    began: float
    """When it was claimed, of `time.monotonic`."""
    branch: Branch | None


class StoreLeases:
    """The attempts of all workers of one server."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float = LEASE_S,
        gateway: str = "",
        interrupted: Callable[[float], bool] = never,
        grade: Grade | None = None,
        recordings: Records | None = None,
    ) -> None:
        """`gateway`: the name of this server, if others share the store; it alone answers the attempts' calls.

        `interrupted`: whether the engine was down at any time since `began` (of `time.monotonic`). An attempt that
        timed out meanwhile is lost, which costs its rollout nothing.
        `grade`: gives the rewards in the workers' place; what workers say about rewards is then ignored.
        `recordings`: has the trunks of branches. None: `store` has them.
        """
        self.lease_s = lease_s
        self._store = store
        self._gateway = gateway
        self._interrupted = interrupted
        self._grade = grade
        self._recordings = store if recordings is None else recordings
        self._waiting: dict[str, _Claim] = {}
        """By worker, the longest wait first."""
        self._turn = asyncio.Lock()
        """Held while attempts are given out."""
        self._given: dict[str, _Given] = {}
        """By rollout."""
        self._grading: dict[str, asyncio.Task[None]] = {}
        """Attempt → its grading and its end. A worker that asks again waits for the same one."""
        self._start = time.monotonic()
        self._looked = math.inf
        """When `run` last looked for leases that have passed, of `time.monotonic`; infinite: it has not begun."""

    def of(self, worker: str, *, labels: Collection[str] = ()) -> "WorkerLeases":
        """The leases of one worker. `labels`: what it offers to rollouts that ask for it."""
        return WorkerLeases(self, worker, labels=frozenset(labels))

    async def resume(self) -> None:
        """Renew the leases that an earlier process of this server has given, once this one can be reached again. It may
        have been away for longer than they last; their workers have gone on, and come back.
        """
        running = await self._store.rollouts(where=Where(status="running"))
        attempts = await self._store.attempts([rollout.id for rollout in running])
        mine = [found.id for found in attempts if found.status == "running" and found.gateway == self._gateway]
        await self._store.heartbeat(mine, lease_s=max(self.lease_s, BACK_S))

    async def run(self) -> None:
        """Give queued rollouts to the claims that wait, and end attempts whose lease has passed, until cancelled."""
        look_s = self.lease_s / CHECKS
        cursor, self._looked = (await self._store.changes()).cursor, time.monotonic()
        while True:
            news = await self._store.changes(cursor, timeout_s=look_s)
            cursor, queued = news.cursor, sum(rollout.status == "queued" for rollout in news.rollouts)
            for rollout in news.rollouts:
                if rollout.status in ("succeeded", "failed"):
                    self._given.pop(rollout.id, None)
            async with self._turn:
                if queued:
                    await self._give(queued)
                if time.monotonic() - self._looked >= look_s:
                    await self._claim("", limit=0)
                    self._looked = time.monotonic()

    async def claim(
        self, worker: str, *, labels: frozenset[str], limit: int, holding: Collection[str], wait_s: float
    ) -> Claimed:
        """See `Leases.claim`. Waits for up to `wait_s`."""
        mine = _Claim(worker=worker, labels=labels, limit=limit, given=asyncio.get_running_loop().create_future())
        before = self._waiting.pop(worker, None)
        if before is not None and not before.given.done():
            before.given.set_result([])
        self._waiting[worker] = mine
        try:
            async with self._turn:
                if not mine.given.done():
                    await self._take(mine, limit=limit, holding=holding)
            if limit:
                await asyncio.wait([mine.given], timeout=wait_s)
            return mine.given.result() if mine.given.done() else []
        finally:
            if self._waiting.get(worker) is mine:
                del self._waiting[worker]

    async def heartbeat(self, worker: str, holding: Collection[str]) -> set[str]:
        """See `Leases.heartbeat`."""
        return await self._store.heartbeat(list(holding), lease_s=self.lease_s, worker=worker) if holding else set()

    async def finish(self, worker: str, attempt_id: str, outcome: Outcome) -> None:
        """See `Leases.finish`."""
        given = self._given.get(_rollout_of(attempt_id))
        if outcome.status == "timeout" and self._interrupted(self._start if given is None else given.began):
            outcome = replace(outcome, status="lost")
        if self._grade is None:
            await self._end(worker, attempt_id, await self._unless_void(attempt_id, outcome))
        elif await self.holds(worker, attempt_id):
            await self._graded(worker, attempt_id, replace(outcome, rewards=()), self._grade)

    async def holds(self, worker: str, attempt_id: str) -> bool:
        """Does this worker run the attempt? False for one that is unknown, or has ended."""
        attempts = await self._store.attempts([_rollout_of(attempt_id)])
        return any(found.id == attempt_id and (found.status, found.worker) == ("running", worker) for found in attempts)

    async def close(self) -> None:
        """Give up the gradings: their attempts run on, and their workers report them to the next server."""
        grading = list(self._grading.values())
        for task in grading:
            task.cancel()
        await asyncio.gather(*grading, return_exceptions=True)

    async def _graded(self, worker: str, attempt_id: str, outcome: Outcome, grade: Grade) -> None:
        """Grade and end an attempt, once. This goes on if the request is cancelled: it may come again."""
        task = self._grading.get(attempt_id)
        if task is None:
            task = asyncio.create_task(self._grade_and_end(worker, attempt_id, outcome, grade))
            self._grading[attempt_id] = task
            task.add_done_callback(lambda ended: self._grading_ended(attempt_id, ended))
        await asyncio.shield(task)

    async def _grade_and_end(self, worker: str, attempt_id: str, outcome: Outcome, grade: Grade) -> None:
        outcome = await self._unless_void(attempt_id, outcome)
        if outcome.status == "succeeded":
            [rollout] = await self._store.rollouts(ids=[_rollout_of(attempt_id)])
            attempts = {attempt.id: attempt for attempt in await self._store.attempts([rollout.id])}
            try:
                outcome = await grade(rollout, attempts[attempt_id], outcome)
            except LightningError as error:
                outcome = Outcome(status="failed", error=f"{type(error).__name__}: {error}")
        await self._end(worker, attempt_id, outcome)

    async def _unless_void(self, attempt_id: str, outcome: Outcome) -> Outcome:
        """The outcome; a failure if the attempt is that of a void branch. A lost attempt stays lost."""
        branch = await self._branch_of(_rollout_of(attempt_id))
        if branch is None or outcome.status == "lost" or (outcome.error or "").startswith(VOID):
            return outcome  # a worker says VOID if a tool must not run again, which is the first cause
        why = await self._why_void(branch, attempt_id)
        if why is None:
            return outcome
        error = why if outcome.error is None else f"{why}\n\n{outcome.error}"
        return Outcome(status="failed", output=outcome.output, error=error)

    async def _branch_of(self, rollout_id: str) -> Branch | None:
        given = self._given.get(rollout_id)
        if given is not None:
            return given.branch
        rollouts = await self._store.rollouts(ids=[rollout_id])  # claimed from an earlier process of this server
        return rollouts[0].branch if rollouts else None

    async def _why_void(self, branch: Branch, attempt_id: str) -> str | None:
        tried = await self._recordings.attempts([_rollout_of(branch.attempt_id)])
        status = next((attempt.status for attempt in tried if attempt.id == branch.attempt_id), None)
        if status != "succeeded":
            ended = "does not exist" if status is None else f"has the status `{status}`"
            return f"{VOID}its trunk, attempt `{branch.attempt_id}`, {ended}"
        trunk = await self._recordings.calls([branch.attempt_id])
        return why_void(branch, trunk=trunk, calls=await self._store.calls([attempt_id]))

    def _grading_ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        del self._grading[attempt_id]
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more; the worker asks again

    async def _end(self, worker: str, attempt_id: str, outcome: Outcome) -> None:
        await self._store.finish(
            attempt_id,
            outcome.status,
            rewards=outcome.rewards,
            output=outcome.output,
            error=outcome.error,
            worker=worker,
        )

    async def _give(self, queued: int) -> None:
        """Share out `queued` new rollouts among the claims that wait."""
        share = math.ceil(queued / max(1, len(self._waiting)))
        nothing: list[frozenset[str]] = []
        for claim in list(self._waiting.values()):
            if claim.given.done() or any(claim.labels <= labels for labels in nothing):
                continue
            await self._take(claim, limit=min(claim.limit, share))
            if not claim.given.done():
                nothing.append(claim.labels)

    async def _take(self, claim: _Claim, *, limit: int, holding: Collection[str] | None = None) -> None:
        """Answer a claim, if there is anything to give."""
        found = await self._claim(claim.worker, limit=limit, labels=claim.labels, holding=holding)
        began = time.monotonic()
        self._given.update((rollout.id, _Given(began, rollout.branch)) for rollout, _ in found)
        # If the claim is gone by now, the next claim of its worker loses these attempts, as it does not hold them.
        if found and not claim.given.done():
            claim.given.set_result(found)

    async def _claim(
        self, worker: str, *, limit: int, labels: Collection[str] = (), holding: Collection[str] | None = None
    ) -> Claimed:
        if time.monotonic() - self._looked > self.lease_s / 2:
            await self.resume()  # this process was held up, e.g. stopped; heartbeats may be waiting to be read
            self._looked = time.monotonic()
        return await self._store.claim(
            worker, limit=limit, lease_s=self.lease_s, labels=labels, holding=holding, gateway=self._gateway
        )


def _rollout_of(attempt_id: str) -> str:
    return attempt_id.rpartition(".")[0]


class WorkerLeases:
    """The attempts of one worker: `Leases` without a network in between."""

    def __init__(self, leases: StoreLeases, worker: str, *, labels: frozenset[str]) -> None:
        self._leases = leases
        self._worker = worker
        self._labels = labels

    @property
    def lease_s(self) -> float:
        return self._leases.lease_s

    async def claim(self, *, limit: int, holding: Collection[str], wait_s: float = WAIT_S) -> Claimed:
        return await self._leases.claim(self._worker, labels=self._labels, limit=limit, holding=holding, wait_s=wait_s)

    async def heartbeat(self, holding: Collection[str]) -> set[str]:
        return await self._leases.heartbeat(self._worker, holding)

    async def finish(self, attempt_id: str, outcome: Outcome) -> None:
        await self._leases.finish(self._worker, attempt_id, outcome)
