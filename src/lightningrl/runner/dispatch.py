"""Claims queued attempts from the store, runs and finishes them, and renews their leases."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from lightningrl.runner.base import Runner
from lightningrl.runner.environment import addresses
from lightningrl.store import Store
from lightningrl.types import Attempt, Rollout

LEASE_S = 60.0
IDLE_POLL_S = 0.02


def never(began: float) -> bool:
    """The engine has not been down since `began`."""
    return False


class Dispatcher:
    """Keeps a runner busy with up to `concurrency` attempts, until cancelled."""

    def __init__(
        self,
        *,
        store: Store,
        runner: Runner,
        base_url: str,
        concurrency: int,
        worker: str,
        interrupted: Callable[[float], bool] = never,
    ) -> None:
        """`interrupted`: whether the engine was down at any time since `began` (of `time.monotonic`). An attempt that
        timed out meanwhile is lost, which costs its rollout nothing.
        """
        self._interrupted = interrupted
        self._store = store
        self._runner = runner
        self._base_url = base_url
        self._concurrency = concurrency
        self._worker = worker
        self._running: dict[asyncio.Task[None], str] = {}

    async def run(self) -> None:
        """Claim and run attempts until cancelled. An error here is LightningRL's, not the agent's, and is raised."""
        heart = asyncio.create_task(self._beat())
        try:
            while True:
                free = self._concurrency - len(self._running)
                claimed = await self._claim(free) if free else []
                for rollout, attempt in claimed:
                    self._running[asyncio.create_task(self._attempt(rollout, attempt))] = attempt.id
                await self._settle(heart, timeout_s=None if len(self._running) == self._concurrency else IDLE_POLL_S)
        finally:
            for task in (heart, *self._running):
                task.cancel()
            await asyncio.gather(heart, *self._running, return_exceptions=True)

    async def _claim(self, limit: int) -> list[tuple[Rollout, Attempt]]:
        holding = list(self._running.values())
        return await self._store.claim(self._worker, limit=limit, lease_s=LEASE_S, holding=holding)

    async def _settle(self, heart: asyncio.Task[None], *, timeout_s: float | None) -> None:
        """Wait until a task ends, or for `timeout_s`. Raises the error of a task that failed."""
        ended, _ = await asyncio.wait([heart, *self._running], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            self._running.pop(task, None)
            task.result()

    async def _attempt(self, rollout: Rollout, attempt: Attempt) -> None:
        began = time.monotonic()
        outcome = await self._runner.run(rollout, attempt, addresses(self._base_url, key=attempt.token))
        if outcome.status == "timeout" and self._interrupted(began):
            outcome = replace(outcome, status="lost")
        await self._store.finish(
            attempt.id, outcome.status, rewards=outcome.rewards, output=outcome.output, error=outcome.error
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self._store.heartbeat(list(self._running.values()), lease_s=LEASE_S)
