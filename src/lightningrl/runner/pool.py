"""Who runs an attempt? The worker process with the least to do; one that dies, or that an agent has blocked, is replaced."""

import asyncio
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lightningrl.config import AgentConfig
from lightningrl.errors import AgentError, GraderError
from lightningrl.runner import wire
from lightningrl.runner.base import Outcome
from lightningrl.runner.environment import make_codex_home, process_environment
from lightningrl.runner.process import WorkerProcess
from lightningrl.types import Attempt, Reward, Rollout

log = logging.getLogger(__name__)

RESTARTS = 3
"""Replacements that may fail to start, one after the other, before a place in the pool stays empty."""


class WorkerPool:
    """A `Runner`. `root` is the recipe's folder: agents are imported from it and run in it.

    `env` is what the processes get from the start, for agents that build their client when they are imported; give it the base URL.
    """

    def __init__(
        self,
        agent: AgentConfig,
        *,
        root: Path,
        env: Mapping[str, str] | None = None,
        secrets: Collection[str] = (),
        log_path: Path | None = None,
        start_timeout_s: float = 120.0,
        watchdog_s: float = 5.0,
        grace_s: float = 30.0,
    ) -> None:
        """`secrets`: environment variables that agents must not get, whatever the recipe says.

        `log_path`: where the agents' stdout and stderr go; None throws them away.
        `watchdog_s`: a worker that is this late with saying that an attempt has timed out is blocked, and killed.
        `grace_s`: what the other attempts in a worker that is being replaced get to finish.
        """
        self._setup = wire.Setup(
            entry=agent.entry, command=agent.command, reward=agent.reward, reward_range=agent.reward_range, root=str(root.resolve())
        )
        self._env = _environment(agent, env or {}, secrets=secrets, folder=log_path.parent if log_path else None)
        self._wanted = agent.workers
        self._capacity = math.ceil(agent.concurrency / agent.workers)
        self._log_path = log_path.resolve() if log_path else None
        self._start_timeout_s, self._watchdog_s, self._grace_s = start_timeout_s, watchdog_s, grace_s
        self._workers: list[WorkerProcess] = []
        self._leaving: set[WorkerProcess] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._closed = False
        self._failure: AgentError | GraderError | None = None

    async def start(self) -> None:
        """Start the workers. Raises `AgentError` or `GraderError` if agent or reward function cannot be loaded."""
        try:
            results = await asyncio.gather(*(self._spawn() for _ in range(self._wanted)), return_exceptions=True)
            for failure in results:
                if failure is not None:
                    raise failure
        except BaseException:
            await self.close()
            raise

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        worker = await self._place()
        if worker is None:
            if self._failure is None:
                return Outcome(status="lost", error="the pool of workers is closed")
            return Outcome(status="failed", error=f"{type(self._failure).__name__}: {self._failure}")
        job = wire.Job(
            id=attempt.id,
            token=attempt.token,
            input=msgspec.Raw(msgspec.json.encode(dict(rollout.task.input))),
            env=dict(env),
            timeout_s=rollout.timeout_s,
        )
        future = worker.submit(job)
        try:
            async with asyncio.timeout(job.timeout_s + self._watchdog_s):
                done = await future
        except TimeoutError:
            log.warning("worker %d is blocked and is killed attempt=%s", worker.pid, attempt.id)
            worker.kill()
            return Outcome(status="timeout", error=f"AgentError: timed out, no answer within {job.timeout_s:g} s; its process is blocked")
        except asyncio.CancelledError:
            worker.cancel(job.id)
            raise
        return Outcome(
            status=done.status,
            output=msgspec.json.decode(done.output),
            rewards=tuple(Reward(attempt_id=attempt.id, name=name, value=value) for name, value in done.rewards.items()),
            error=done.error,
        )

    async def close(self) -> None:
        """End every process. What still runs is lost."""
        self._closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        workers = [*self._workers, *self._leaving]
        self._workers.clear()
        self._leaving.clear()
        await asyncio.gather(*(worker.close() for worker in workers))
        self._wake_all()

    async def _place(self) -> WorkerProcess | None:
        """A worker with room, in the order of asking. None when there will never be one."""
        while True:
            free = [w for w in self._workers if not w.retired and w.load < self._capacity]
            if free:
                return min(free, key=lambda w: w.load)
            if self._closed or (not self._workers and not self._starting):
                return None
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()  # the turn came, and is handed on
                raise

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _wake_all(self) -> None:
        while self._waiting:
            self._wake()

    async def _spawn(self) -> None:
        worker = await WorkerProcess.spawn(self._setup, env=self._env, log=self._log_path, timeout_s=self._start_timeout_s)
        worker.changed = self._changed
        self._workers.append(worker)
        self._wake_all()

    def _changed(self, worker: WorkerProcess) -> None:
        if worker.retired and worker in self._workers:
            self._workers.remove(worker)
            self._leaving.add(worker)
            log.warning("worker %d is replaced", worker.pid)
            self._in_background(self._wind_down(worker))
            self._starting += 1
            self._in_background(self._replace())
        self._wake()

    async def _wind_down(self, worker: WorkerProcess) -> None:
        """Let the other attempts of a worker finish, then end it."""
        await worker.idle(timeout_s=self._grace_s)
        worker.kill()
        await worker.close()
        self._leaving.discard(worker)

    async def _replace(self) -> None:
        try:
            for _ in range(RESTARTS):
                try:
                    return await self._spawn()
                except (AgentError, GraderError) as error:
                    self._failure = error
                    log.warning("a worker could not be replaced: %s", error.message)
        finally:
            self._starting -= 1
            self._wake_all()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _environment(agent: AgentConfig, given: Mapping[str, str], *, secrets: Collection[str], folder: Path | None) -> dict[str, str]:
    """The processes' environment. What an attempt gets is laid over it, in programs as a whole, in functions without the key."""
    gateway = given.get("OPENAI_BASE_URL", "").removesuffix("/v1") or None
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # `python` means this one
    codex_home = make_codex_home(folder / "codex", gateway=gateway) if folder and gateway else None
    wishes = {"PATH": path, **agent.env}
    environment = process_environment(gateway, inherit=agent.inherit_env, secrets=secrets, wishes=wishes, codex_home=codex_home)
    return {**environment, **given}
