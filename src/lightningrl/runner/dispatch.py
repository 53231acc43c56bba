"""Runs the attempts that a worker claims, renews their leases, and finishes them."""

import asyncio
from collections.abc import Callable

from lightningrl.leases import Leases
from lightningrl.runner.base import Runner
from lightningrl.runner.environment import addresses
from lightningrl.types import Attempt, Rollout

BEATS = 4
"""Fewest heartbeats in the time of a lease."""
BEAT_S = 5.0
"""Most seconds between two heartbeats. They also tell a worker that its server is away."""


class Dispatcher:
    """Keeps a runner busy with up to `concurrency` attempts, until it is cancelled or drained."""

    def __init__(self, *, leases: Leases, runner: Runner, base_url: str, concurrency: int) -> None:
        self._leases = leases
        self._runner = runner
        self._base_url = base_url
        self._concurrency = concurrency
        self._running: dict[str, asyncio.Task[None]] = {}
        """By attempt, until its end is acknowledged."""
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of attempts that run, or whose end is not acknowledged yet."""
        return len(self._running)

    def drain(self) -> None:
        """Claim nothing more. `run` returns when the attempts that run have ended."""
        self._drained.set()

    async def run(self) -> None:
        """Claim and run attempts. An error here is LightningRL's, not the agent's, and is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                heart = tasks.create_task(self._beat())
                claiming = tasks.create_task(self._claim(tasks))
                await self._drained.wait()
                claiming.cancel()
                await asyncio.wait([claiming])
                await self._leases.claim(limit=0, holding=list(self._running))  # gives back what nobody has received
                await self._until(lambda: not self._running)
                heart.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _claim(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._until(lambda: len(self._running) < self._concurrency)
            free = self._concurrency - len(self._running)
            for rollout, attempt in await self._leases.claim(limit=free, holding=list(self._running)):
                task = self._running[attempt.id] = tasks.create_task(self._attempt(rollout, attempt))
                task.add_done_callback(lambda _, ended=attempt.id: self._end(ended))

    async def _attempt(self, rollout: Rollout, attempt: Attempt) -> None:
        outcome = await self._runner.run(rollout, attempt, addresses(self._base_url, key=attempt.token))
        await self._leases.finish(attempt.id, outcome)

    def _end(self, attempt_id: str) -> None:
        del self._running[attempt_id]
        self._changed.set()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    async def _beat(self) -> None:
        """Renew leases, and end the attempts whose lease was lost: their rollouts run elsewhere by now."""
        while True:
            await asyncio.sleep(min(self._leases.lease_s / BEATS, BEAT_S))
            held = list(self._running)
            if not held:
                continue
            kept = await self._leases.heartbeat(held)
            for attempt_id in set(held).difference(kept) & self._running.keys():
                self._running[attempt_id].cancel()
