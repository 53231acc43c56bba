"""A worker on another machine: leases over HTTP, a relay for its agents, and the pool that runs them."""

import asyncio
import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import lightningrl
from lightningrl.config import Config
from lightningrl.leases import Outcome
from lightningrl.remote.digest import copy_of
from lightningrl.remote.wire import Hello, Welcome
from lightningrl.runner.base import Runner
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.runner.outages import Outages
from lightningrl.runner.pool import WorkerPool
from lightningrl.runner.relay import Relay
from lightningrl.runner.remote import Place, RemoteLeases, Watcher, remote_leases, trusted
from lightningrl.types import Attempt, Rollout

LOOK_S = 1.0
"""Seconds between two looks at whether the server is away, while a worker ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What one worker does for a server."""

    config: Config
    """The worker's own copy of the recipe."""
    place: Place
    id: str
    """`<name>-<6 hex digits>`."""
    name: str
    labels: Sequence[str] = ()
    processes: int
    concurrency: int
    max_attempts: float = math.inf
    """The worker ends after so many."""
    accept_differences: bool = False
    folder: Path
    """For the agents' output."""


def worker_id(name: str) -> str:
    """An id for one process of a worker of this name."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:100]}-{secrets.token_hex(3)}"


def machine_name() -> str:
    return socket.gethostname() or "worker"


class RelayedRunner:
    """A `Runner` whose agents talk to the server through a relay.

    An attempt that the relay calls disturbed is lost. So is one that timed out or failed while the server was away.
    """

    def __init__(self, runner: Runner, relay: Relay, outages: Outages) -> None:
        self._runner = runner
        self._relay = relay
        self._outages = outages

    async def start(self) -> None:
        await self._runner.start()

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        began = time.monotonic()
        self._relay.begin(attempt.id, attempt.token)
        disturbed = None
        try:
            outcome = await self._runner.run(rollout, attempt, env)
        finally:
            disturbed = self._relay.end(attempt.id)
        if disturbed is None and _is_the_agents(outcome) and self._outages.since(began):
            disturbed = f"the server was away, or the worker was stopped, while the agent ran: {outcome.error}"
        return outcome if disturbed is None else Outcome(status="lost", error=disturbed)

    async def close(self) -> None:
        await self._runner.close()


def _is_the_agents(outcome: Outcome) -> bool:
    """Is this a failure of the agent?"""
    return outcome.status in ("timeout", "failed") and (outcome.error or "").startswith("AgentError")


class Told:
    """A `Watcher` that also tells the relay whether the server is there."""

    def __init__(self, watcher: Watcher, relay: Relay, outages: Outages) -> None:
        self._watcher = watcher
        self._relay = relay
        self._outages = outages
        self._gone = False

    def connected(self, welcome: Welcome) -> None:
        self._watcher.connected(welcome)

    def away(self, why: str) -> None:
        self._watcher.away(why)

    def gone(self) -> None:
        self._gone = True
        self._relay.server_away()
        self._outages.begin()
        self._watcher.gone()

    def back(self, seconds: float) -> None:
        if self._gone:
            self._gone = False
            self._outages.end()
            self._relay.server_back()
        self._watcher.back(seconds)

    def began(self, rollout: Rollout, attempt: Attempt) -> None:
        self._watcher.began(rollout, attempt)

    def ended(self, attempt_id: str, outcome: Outcome) -> None:
        self._watcher.ended(attempt_id, outcome)

    def over(self) -> None:
        self._watcher.over()

    def taken(self, attempt_ids: Collection[str]) -> None:
        self._watcher.taken(attempt_ids)


async def work(
    options: WorkerOptions, *, watcher: Watcher, draining: Callable[[Callable[[], None]], object] = lambda drain: None
) -> None:
    """Work for the server until the worker is drained, or has run `max_attempts`.

    `draining` receives the function that makes the worker claim no more. Raises `UserError` if the server does not
    admit the worker, `AgentError` or `GraderError` if its recipe cannot be loaded.
    """
    place, agent = options.place, options.config.agent
    hello = Hello(
        worker=options.id,
        name=options.name,
        labels=tuple(options.labels),
        concurrency=options.concurrency,
        version=lightningrl.__version__,
        copy=await asyncio.to_thread(copy_of, agent, root=options.config.root),
        accept_differences=options.accept_differences,
    )
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(Relay(place.url, host=agent.relay_host, ssl=trusted(place.ca_file)))
        outages = Outages()
        told = Told(watcher, relay, outages)
        serving = remote_leases(place, hello, watcher=told, max_attempts=options.max_attempts)
        leases = await stack.enter_async_context(serving)
        draining(leases.ending.set)
        watching = asyncio.create_task(outages.watch())
        starting = asyncio.create_task(_started(options, leases, relay))
        stopping = asyncio.create_task(leases.ending.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                runner = RelayedRunner(starting.result(), relay, outages)
                await _run(runner, options, leases, relay, stopping)
        finally:
            for task in (starting, stopping, watching):
                task.cancel()
            await asyncio.wait((starting, stopping, watching))
            await leases.bye()


async def _started(options: WorkerOptions, leases: RemoteLeases, relay: Relay) -> WorkerPool:
    """The processes for agents, after the server has admitted the worker."""
    await leases.hello()
    config = options.config
    agent = config.agent.model_copy(update={"workers": options.processes, "concurrency": options.concurrency})
    pool = WorkerPool(
        agent,
        root=config.root,
        env={"OPENAI_BASE_URL": f"{relay.url}/v1"},
        secrets=config.secrets(),
        log_path=options.folder / "agents.log",
    )
    await pool.start()
    return pool


async def _run(
    runner: RelayedRunner, options: WorkerOptions, leases: RemoteLeases, relay: Relay, stopping: asyncio.Task[bool]
) -> None:
    """Run attempts until `stopping` is done, and then those that run; but not for a server that stays away."""
    dispatcher = Dispatcher(leases=leases, runner=runner, base_url=relay.url, concurrency=options.concurrency)
    running = asyncio.create_task(dispatcher.run())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        dispatcher.drain()
        while leases.away_s < leases.lease_s:  # beyond, what it holds is lost
            if (await asyncio.wait((running,), timeout=LOOK_S))[0]:
                running.result()
                return
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await runner.close()
