"""Runs attempts in worker processes. Each attempt goes to the worker with the fewest jobs.

A worker that dies, blocks, or runs out of files or memory is replaced. Attempts share a worker, so one of them can
break it for the others. If the culprit is known, it alone fails; the others are `lost`, which costs their rollouts
nothing. If it is unknown, all of them are lost, and each rollout is retried in a worker of its own.
"""

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
from lightningrl.leases import Outcome
from lightningrl.runner import wire
from lightningrl.runner.boundary import as_json
from lightningrl.runner.environment import make_codex_home, process_environment
from lightningrl.runner.isolation import check, configured
from lightningrl.runner.logfile import keep_small
from lightningrl.runner.process import WorkerProcess
from lightningrl.types import Attempt, Reward, Rollout

log = logging.getLogger(__name__)

LOG_LIMIT = 32 * 2**20
"""Bytes of the log with the agents' output. As many bytes again are kept from before it was emptied."""
RESTARTS = 3
"""Attempts to start a replacement before its place in the pool stays empty."""


class WorkerPool:
    """A `Runner` with a pool of worker processes."""

    def __init__(
        self,
        agent: AgentConfig,
        *,
        root: Path,
        grades: bool = False,
        env: Mapping[str, str] | None = None,
        secrets: Collection[str] = (),
        log_path: Path | None = None,
        log_limit: int = LOG_LIMIT,
        start_timeout_s: float = 120.0,
        watchdog_s: float = 5.0,
        grace_s: float = 30.0,
    ) -> None:
        """`root`: the recipe's folder. Agents are imported from it and run in it.

        `grades`: the pool grades the attempts that others have run (`grade`), and runs no agent itself.
        `env`: variables of the worker processes; pass the base URL, for agents that build their client on import.
        `secrets`: variables that agents must not get, whatever the recipe says.
        `log_path`: file for the agents' stdout and stderr; None discards them. At `log_limit` bytes it is emptied, and
        its end is kept as `<log_path>.1`.
        `watchdog_s`: a worker that reports a timeout later than this is blocked, and is killed.
        `grace_s`: grace period for the other attempts in a worker that is being replaced.
        """
        self._setup = wire.Setup(
            entry=None if grades else agent.entry,
            command=None if grades else agent.command,
            reward=agent.reward if grades or agent.grade == "worker" else None,
            reward_range=agent.reward_range,
            root=str(root.resolve()),
            isolation=configured(agent, root=root.resolve(), run_folder=log_path.parent if log_path else None),
        )
        self._env = _environment(agent, env or {}, secrets=secrets, folder=log_path.parent if log_path else None)
        self._wanted = max(1, agent.workers)
        self._capacity = math.ceil(agent.concurrency / self._wanted)
        self._log_path, self._log_limit = log_path.resolve() if log_path else None, log_limit
        self._start_timeout_s, self._watchdog_s, self._grace_s = start_timeout_s, watchdog_s, grace_s
        self._workers: list[WorkerProcess] = []
        self._leaving: set[WorkerProcess] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._suspects: set[str] = set()
        """Ids of rollouts that may have broken a worker. They run in a worker of their own."""
        self._alone = asyncio.Semaphore(self._wanted)
        self._starting = 0
        self._closed = False
        self._failure: AgentError | GraderError | None = None

    async def start(self) -> None:
        """Start the workers. Raises `AgentError` or `GraderError` if agent or reward function cannot be loaded.

        Raises `UserError` if the recipe wants sandboxes, and they cannot be made here.
        """
        if self._setup.isolation is not None:
            await asyncio.to_thread(check)
        try:
            results = await asyncio.gather(*(self._spawn() for _ in range(self._wanted)), return_exceptions=True)
            for failure in results:
                if failure is not None:
                    raise failure
        except BaseException:
            await self.close()
            raise
        if self._log_path is not None:
            self._in_background(keep_small(self._log_path, limit=self._log_limit))

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        return await self._do(rollout, _job(rollout, attempt, env))

    async def grade(self, rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        """Grade an attempt whose agent has succeeded elsewhere."""
        job = msgspec.structs.asdict(_job(rollout, attempt, {}))
        return await self._do(rollout, wire.Grading(**job, output=msgspec.Raw(as_json(outcome.output))))

    async def _do(self, rollout: Rollout, job: wire.Job) -> Outcome:
        if rollout.id in self._suspects:
            return await self._run_alone(rollout.id, job)
        worker = await self._place()
        if worker is None:
            return _closed() if self._failure is None else _refused(self._failure)
        done = await self._run_in(worker, job)
        if done.suspect:
            self._suspects.add(rollout.id)
        return _outcome(done)

    async def _run_in(self, worker: WorkerProcess, job: wire.Job) -> wire.Done:
        future = worker.submit(job)
        try:
            async with asyncio.timeout(job.timeout_s + self._watchdog_s):
                return await future
        except TimeoutError:
            return self._overdue(worker, job)
        except asyncio.CancelledError:
            worker.cancel(job.id)
            raise

    def _overdue(self, worker: WorkerProcess, job: wire.Job) -> wire.Done:
        """Handle a job whose result is overdue: its worker's event loop is blocked, by this job or by another one."""
        blocker = worker.blocked_by
        if blocker == job.id or worker.jobs <= {job.id}:
            log.warning("worker %d is blocked and is killed attempt=%s", worker.pid, job.id)
            worker.kill(reason=f"attempt `{job.id}` blocked the event loop of their process")
            error = f"timed out, no answer within {job.timeout_s:g} s; it blocks the event loop of its process"
            return wire.Done(id=job.id, status="timeout", error=f"AgentError: {error}")
        if blocker in worker.jobs:  # its own time is not over yet
            worker.abandon(job.id)
            error = f"attempt `{blocker}` blocked the event loop of their process"
            return wire.Done(id=job.id, status="lost", error=error)
        log.warning("worker %d is blocked and is killed; by which attempt is not known", worker.pid)
        worker.kill()
        return wire.Done(id=job.id, status="lost", error="the event loop of its process was blocked", suspect=True)

    async def _run_alone(self, rollout_id: str, job: wire.Job) -> Outcome:
        """Run a suspect in a process of its own. If that process breaks too, the attempt has failed."""
        async with self._alone:
            try:
                worker = None if self._closed else await self._new_worker()
            except (AgentError, GraderError) as error:
                return _refused(error)
            if worker is None:
                return _closed()
            self._leaving.add(worker)
            try:
                done = await self._run_in(worker, job)
            finally:
                await worker.close()
                self._leaving.discard(worker)
        if self._closed:
            return _closed()
        if done.suspect:
            what, line_end, rest = (done.error or "").removeprefix("AgentError: ").partition("\n")
            return Outcome(
                status="failed", error=f"AgentError: {what}, also when the attempt ran alone{line_end}{rest}"
            )
        if done.status in ("succeeded", "failed"):
            self._suspects.discard(rollout_id)
        return _outcome(done)

    async def close(self) -> None:
        """End all processes. Running attempts are lost."""
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
        """Wait for a worker with room, first come, first served. None if there will never be one."""
        while True:
            free = [w for w in self._workers if not w.retired and w.load < self._capacity]
            if free:
                return min(free, key=lambda w: (w.blocked_by is not None, w.load))
            if self._closed or (not self._workers and not self._starting):
                return None
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()  # pass the turn on
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
        worker = await self._new_worker()
        if self._closed:
            return await worker.close()
        worker.changed = self._changed
        self._workers.append(worker)
        self._wake_all()

    async def _new_worker(self) -> WorkerProcess:
        return await WorkerProcess.spawn(
            self._setup, env=self._env, log=self._log_path, timeout_s=self._start_timeout_s
        )

    def _changed(self, worker: WorkerProcess) -> None:
        if worker.retired and worker in self._workers and not self._closed:
            self._workers.remove(worker)
            self._leaving.add(worker)
            log.warning("worker %d is replaced", worker.pid)
            self._in_background(self._wind_down(worker))
            self._starting += 1
            self._in_background(self._replace())
        self._wake()

    async def _wind_down(self, worker: WorkerProcess) -> None:
        """Let a worker's other attempts finish, then end it."""
        await worker.idle(timeout_s=self._grace_s)
        worker.kill(reason="its process was replaced because of another attempt")
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


def _job(rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> wire.Job:
    return wire.Job(
        id=attempt.id,
        token=attempt.token,
        input=msgspec.Raw(msgspec.json.encode(dict(rollout.task.input))),
        env=dict(env),
        timeout_s=rollout.timeout_s,
        branch=rollout.branch is not None,
    )


def _outcome(done: wire.Done) -> Outcome:
    return Outcome(
        status=done.status,
        output=msgspec.json.decode(done.output),
        rewards=tuple(Reward(attempt_id=done.id, name=name, value=value) for name, value in done.rewards.items()),
        error=done.error,
    )


def _closed() -> Outcome:
    return Outcome(status="lost", error="the pool of workers is closed")


def _refused(error: AgentError | GraderError) -> Outcome:
    return Outcome(status="failed", error=f"{type(error).__name__}: {error}")


def _environment(
    agent: AgentConfig, given: Mapping[str, str], *, secrets: Collection[str], folder: Path | None
) -> dict[str, str]:
    """The environment of the worker processes. An attempt's own variables come later, for functions without keys."""
    gateway = given.get("OPENAI_BASE_URL", "").removesuffix("/v1") or None
    # `python` is this process's Python
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    codex_home = make_codex_home(folder / "codex", gateway=gateway) if folder and gateway else None
    wishes = {"PATH": path, **agent.env}
    environment = process_environment(
        gateway, inherit=agent.inherit_env, secrets=secrets, wishes=wishes, codex_home=codex_home
    )
    return {**environment, **given}
