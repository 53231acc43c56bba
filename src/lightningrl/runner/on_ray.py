"""Workers on a Ray cluster: actors, each of which works for the server as `lightningrl worker` does.

Ray places them, copies the recipe's folder to their nodes, starts an actor again when its process or node has died, and
keeps those waiting that no node has room for. The driver, `RayWorkers`, only watches them, and tells them to end.
"""

import asyncio
import logging
import math
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]  # in an environment of its own, see the Makefile

from lightningrl.errors import AgentError, GraderError, UserError
from lightningrl.leases import Outcome
from lightningrl.recipe import load_config
from lightningrl.remote.wire import Welcome
from lightningrl.runner.remote import Place
from lightningrl.runner.remote_worker import WorkerOptions, work, worker_id
from lightningrl.types import Attempt, Rollout

NOT_COPIED = ["runs/", "*.safetensors", "*.gguf", ".venv*/", "__pycache__/"]
"""What Ray leaves out of the recipe's folder: runs, weights of models and environments. Patterns as in a .gitignore."""
SILENT_S = 10.0
"""An actor that has not answered for so long is not waited for at the end: it has no node."""
PROCESSES = 2
"""Processes for agents if the recipe says 0, which is meant for the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What every actor is told. Ray pickles it on its way, as it does with all arguments of actors."""

    url: str
    key: str
    recipe: str
    """The recipe.toml: relative to the folder that Ray has copied, or the same path on every node."""
    overrides: Sequence[str] = ()
    name: str = ""
    """First part of the workers' names; empty: the name of the node."""
    labels: Sequence[str] = ()
    concurrency: int | None = None
    """Attempts of each actor at the same time. None: as the recipe says."""
    processes: int | None = None
    """None: as the recipe says."""
    max_attempts: float = math.inf
    certificates: str | None = None
    """PEM. None: those of the system."""
    accept_differences: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one actor has done since it started."""

    worker: str
    """Its id, another one after each restart."""
    node: str
    """Name of the host, and the first digits of Ray's id of the node."""
    connected: bool
    running: int
    succeeded: int
    failed: int
    lost: int
    over: bool
    """Whether the server has said that the run is complete."""
    error: str = ""
    """The first line of its latest failure."""


class Tally:
    """A watcher that counts."""

    def __init__(self) -> None:
        self.connected_now = False
        self.is_over = False
        self.running: set[str] = set()
        self.ends: Counter[str] = Counter()
        self.error = ""

    def connected(self, welcome: Welcome) -> None:
        self.connected_now = True

    def away(self, why: str) -> None:
        self.connected_now = False
        self.error = f"the server is away: {why}"

    def gone(self) -> None:
        """`away` has said it."""

    def back(self, seconds: float) -> None:
        self.connected_now = True
        self.error = ""

    def began(self, rollout: Rollout, attempt: Attempt) -> None:
        self.running.add(attempt.id)

    def ended(self, attempt_id: str, outcome: Outcome) -> None:
        self.running.discard(attempt_id)
        self.ends["failed" if outcome.status == "timeout" else outcome.status] += 1
        if outcome.error:
            self.error = outcome.error.partition("\n")[0]

    def over(self) -> None:
        self.connected_now = False
        self.is_over = True

    def taken(self, attempt_ids: Collection[str]) -> None:
        self.running.difference_update(attempt_ids)
        self.ends["lost"] += len(attempt_ids)


class RayWorker:
    """The actor. All of its methods run in one event loop."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        host = socket.gethostname()
        self._node = f"{host} {ray.get_runtime_context().get_node_id()[:6]}"
        self._id = worker_id(orders.name or host)
        self._tally = Tally()
        self._drain: Callable[[], None] | None = None
        self._draining = False

    async def work(self) -> tuple[str, str] | None:
        """Work until `drain`, or until the run is complete. Returns an error and its hint that all workers share."""
        try:
            with tempfile.TemporaryDirectory(prefix="lightningrl-worker-", ignore_cleanup_errors=True) as folder:
                options = _options(self._orders, self._id, Path(folder))
                await work(options, watcher=self._tally, draining=self._may_drain)
        except (UserError, AgentError, GraderError) as error:
            return error.message, error.hint or ""
        return None

    async def drain(self) -> None:
        """Claim no more; `work` returns when the running attempts have ended."""
        self._draining = True
        if self._drain is not None:
            self._drain()

    async def report(self) -> Report:
        tally = self._tally
        return Report(
            worker=self._id,
            node=self._node,
            connected=tally.connected_now,
            running=len(tally.running),
            succeeded=tally.ends["succeeded"],
            failed=tally.ends["failed"],
            lost=tally.ends["lost"],
            over=tally.is_over,
            error=tally.error,
        )

    def _may_drain(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        if self._draining:
            drain()


class RayWorkers:
    """The driver's side: `count` actors. They end with the driver."""

    def __init__(self, orders: Orders, *, count: int, cpus: float) -> None:
        """Ask Ray for the actors, spread over the nodes. `cpus`: cores that Ray reserves for each."""
        actor = ray.remote(RayWorker).options(
            num_cpus=cpus, max_restarts=-1, max_task_retries=-1, scheduling_strategy="SPREAD"
        )
        self._actors = [actor.remote(orders) for _ in range(count)]
        self._work = [each.work.remote().future() for each in self._actors]
        self._reports: dict[str, Report] = {}
        """Worker → its latest report, also of those that have died."""
        self._current: dict[int, Report] = {}
        """Number of an actor → its report, if it has just answered."""
        self._heard_at: dict[int, float] = {}
        self._ending = False

    def drain(self) -> None:
        """Let the workers end after their attempts. Call it again and again: an actor that starts again forgets it."""
        self._ending = True
        for number, each in enumerate(self._actors):
            if time.monotonic() - self._heard_at.get(number, -math.inf) < SILENT_S:
                each.drain.options(max_task_retries=0).remote()
            else:
                ray.kill(each)

    async def ended(self) -> None:
        """Wait until all actors have ended. Raises `UserError` for what hinders the first of them."""
        for ending in asyncio.as_completed([asyncio.wrap_future(future) for future in self._work]):
            try:
                problem = await ending
            except ray.exceptions.RayActorError as error:
                if self._ending:
                    continue
                hint = "is the same version of lightningrl and of Ray installed on all nodes?"
                raise UserError(f"a worker cannot start: {_last_line(error)}", hint=hint) from error
            if problem:
                raise UserError(problem[0], hint=problem[1] or "see `agents.log` of the worker")

    async def watch(self, *, timeout_s: float) -> None:
        """Ask every actor for its report, and wait for up to `timeout_s`."""
        asked = {
            asyncio.wrap_future(each.report.options(max_task_retries=0).remote().future()): number
            for number, each in enumerate(self._actors)
        }
        done, late = await asyncio.wait(asked, timeout=timeout_s)
        for future in late:
            future.cancel()
        answered = [future for future in done if not future.cancelled() and future.exception() is None]
        self._current = {asked[future]: future.result() for future in answered}
        self._heard_at |= dict.fromkeys(self._current, time.monotonic())
        self._reports |= {report.worker: report for report in self._current.values()}

    @property
    def waiting(self) -> int:
        """Number of actors that have not answered: they start, or wait for a node."""
        return len(self._actors) - len(self._current)

    @property
    def over(self) -> bool:
        """Whether the run is complete. A worker that starts again after that would wait for a server that has ended."""
        return any(report.over for report in self._reports.values())

    @property
    def current(self) -> list[Report]:
        return list(self._current.values())

    @property
    def reports(self) -> list[Report]:
        """The latest report of each worker that ever answered."""
        return list(self._reports.values())

    def close(self) -> None:
        for each in self._actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(each)


def connect(address: str, *, folder: Path | None) -> None:
    """Connect to the cluster at `address`, and copy `folder` to its nodes. Raises `UserError`."""
    environment: dict[str, Any] = {"env_vars": {"RAY_USE_UVLOOP": "0"}}
    if folder is not None:
        environment |= {"working_dir": str(folder), "excludes": NOT_COPIED}
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        hint = "start one with `ray start --head`, or name it with `--ray-address`"
        raise UserError(f"cannot use the Ray cluster at `{address}`: {_last_line(error)}", hint=hint) from error


def disconnect() -> None:
    ray.shutdown()


def _options(orders: Orders, worker: str, folder: Path) -> WorkerOptions:
    config = load_config(Path(orders.recipe), orders.overrides)
    certificates = None
    if orders.certificates is not None:
        certificates = folder / "certificates.pem"
        certificates.write_text(orders.certificates, encoding="ascii")
    return WorkerOptions(
        config=config,
        place=Place(url=orders.url, key=orders.key, ca_file=certificates),
        id=worker,
        name=worker.rpartition("-")[0],
        labels=orders.labels,
        processes=orders.processes or config.agent.workers or PROCESSES,
        concurrency=orders.concurrency or config.agent.concurrency,
        max_attempts=orders.max_attempts,
        accept_differences=orders.accept_differences,
        folder=folder,
    )


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
