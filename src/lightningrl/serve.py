"""The Lightning Server: store, engines, gateway and agents, started from a configuration and ended again.

store       what happened: rollouts, calls, rewards, versions of the weights
engines     token ids in, sampled token ids and log-probabilities out
gateway     the HTTP side: an agent's request → engine → store
leases      give queued rollouts to workers: the dispatcher of this process, and others over HTTP
dispatcher  runs the agent on what it is given, in worker processes
learners    turn records into new weights; `Loop` drives them
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import lightningrl
from lightningrl.agents import running_agents
from lightningrl.chat import ChatTemplate
from lightningrl.checkpoints import Checkpoints
from lightningrl.config import Config
from lightningrl.engine.base import Engine
from lightningrl.engine.vllm_fleet import Fleet
from lightningrl.engine.vllm_process import Say
from lightningrl.engines import make_engine, make_engines, model_paths
from lightningrl.errors import UserError
from lightningrl.gateway.assembly import make_gateway
from lightningrl.gateway.scripted import PLAIN
from lightningrl.gateway.server import bound
from lightningrl.gateway.workers import Workers, worker_key
from lightningrl.hosted.cost import Spent
from lightningrl.hosted.service import Service, address_of
from lightningrl.learner import Learner
from lightningrl.leases import never
from lightningrl.loop import Loop
from lightningrl.models.load import local_folder
from lightningrl.policies import load_models, make_learners, remote_policies, set_up_devices
from lightningrl.progress import Watcher
from lightningrl.remote.digest import served_copy
from lightningrl.servers import owned_fleet
from lightningrl.store import Store, open_store
from lightningrl.store.place import url_of

Starting: TypeAlias = Callable[[str], None]
"""Receives a line for the user before each slow step of the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningServer:
    """A running server."""

    config: Config
    folder: Path
    """The run's: store, checkpoints, logs."""
    store: Store
    template: ChatTemplate
    learners: tuple[Learner, ...]
    """The policies that learn, in the order of the recipe."""
    checkpoints: Checkpoints
    workers: Workers
    """Those on other machines."""
    port: int
    """Of the gateway."""
    spent: Spent | None = None
    """What a service has processed; None: this machine computes."""

    def loop(self, watcher: Watcher) -> Loop:
        return Loop(
            self.config,
            store=self.store,
            learners=self.learners,
            checkpoints=self.checkpoints,
            folder=self.folder,
            watcher=watcher,
            spent=self.spent,
        )

    async def version(self) -> int:
        """Number of steps that a resumed run has completed; 0 for a new run."""
        return max(await self.checkpoints.newest(), 0)

    async def export(self, folder: Path) -> None:
        """Write the current weights into `folder`; with several policies, into a folder for each inside it."""
        for learner in self.learners:
            await learner.export(folder / learner.name if len(self.learners) > 1 else folder)


@asynccontextmanager
async def lightning(
    config: Config, folder: Path, *, starting: Starting = lambda what: None, waiting: Say = lambda what: None
) -> AsyncIterator[LightningServer]:
    """Start everything; end it in reverse order when the block is left. What users get wrong most often comes first:
    the port, the device, then the model, then the agent. `waiting` receives what a server of the run does, at any time;
    empty: nothing that needs waiting.
    """
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        starting(_loading(config))
        folders = await asyncio.to_thread(_folders, config)
        template = await asyncio.to_thread(ChatTemplate.load, folders[config.model.path])
        loading, service = load_models, None
        if config.backend == "tinker":
            service = Service(config.service)
            stack.push_async_callback(asyncio.to_thread, service.close)
            loading = partial(remote_policies, service=service)
        models = await asyncio.to_thread(loading, config, folders)
        store = await _open_store(stack, folder)
        starting(f"starting the engine `{config.engine.name}`")
        fleet = await stack.enter_async_context(owned_fleet(config, folders, folder, say=waiting))
        engines = make_engines(config, folders, template=template, models=models, fleet=fleet)
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        compute = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="trainer"))
        urls = config.engine.urls if fleet is None else fleet.urls
        making = partial(make_learners, config, models, engines, folders, compute=compute, folder=folder, servers=urls)
        learners = await asyncio.get_running_loop().run_in_executor(compute, making)
        for learner in learners:
            # Rollouts of an earlier run may be queued; they wait until the loop has restored their weights.
            await learner.engine.pause()
        starting(_workers(config))
        serving = _agents(config, sock, folder, store=store, template=template, engines=engines, fleet=fleet)
        workers = await stack.enter_async_context(serving)
        yield LightningServer(
            config=config,
            folder=folder,
            store=store,
            template=template,
            learners=learners,
            checkpoints=Checkpoints(folder, store=store, learners=learners),
            workers=workers,
            port=sock.getsockname()[1],
            spent=None if service is None else service.spent,
        )


@asynccontextmanager
async def relaying(
    config: Config, folder: Path, *, starting: Starting = lambda what: None
) -> AsyncIterator[LightningServer]:
    """Start everything but a model: routes lead to other servers, or to the script that `engine.name` names."""
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        template = ChatTemplate.load(PLAIN)
        scripted = sorted({route.policy for route in config.routes} & config.learners().keys())
        engines = {policy: make_engine(config, policy, folder=PLAIN, template=template) for policy in scripted}
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        store = await _open_store(stack, folder)
        starting(_workers(config))
        serving = _agents(config, sock, folder, store=store, template=template, engines=engines)
        workers = await stack.enter_async_context(serving)
        yield LightningServer(
            config=config,
            folder=folder,
            store=store,
            template=template,
            learners=(),
            checkpoints=Checkpoints(folder, store=store, learners=()),
            workers=workers,
            port=sock.getsockname()[1],
        )


def check_local(config: Config) -> None:
    """Raises `UserError` if this machine alone cannot run the recipe's agents: only a training run has workers."""
    hint = "add `agent.workers=2 agent.labels=[]` to run them on this machine"
    if not config.agent.workers:
        raise UserError("`agent.workers` is `0`, but this command runs agents on this machine", hint=hint)
    if config.agent.labels:
        raise UserError("`agent.labels` are for workers, but this command runs agents on this machine", hint=hint)


def _folders(config: Config) -> dict[str, Path]:
    """Model path → folder on this machine, for every model of the run."""
    paths = dict.fromkeys([config.model.path, *model_paths(config).values()])
    weights = config.backend == "local"
    return {path: Path(local_folder(path, root=config.root, weights=weights)) for path in paths}


async def _open_store(stack: AsyncExitStack, folder: Path) -> Store:
    store = await open_store(url_of(folder), exclusive=True)
    stack.push_async_callback(store.close)
    return store


@asynccontextmanager
async def _agents(
    config: Config,
    sock: socket.socket,
    folder: Path,
    *,
    store: Store,
    template: ChatTemplate,
    engines: Mapping[str, Engine],
    fleet: Fleet | None = None,
) -> AsyncIterator[Workers]:
    """Answer agents, and run the rollouts that are queued. Yields the workers on other machines."""
    async with AsyncExitStack() as stack:
        reading = asyncio.to_thread(served_copy, config.agent, root=config.root, folder=folder)
        copy = asyncio.create_task(reading)
        stack.push_async_callback(asyncio.wait, (copy,))  # it writes into the folder, which may be a temporary one
        version = lightningrl.__version__
        workers = Workers(key=worker_key(folder), recipe=config.name, version=version, copy=copy)
        gateway = make_gateway(config, store=store, template=template, engines=engines, workers=workers)
        interrupted = never if fleet is None else fleet.was_down
        running = running_agents(config, gateway, sock, folder, store=store, interrupted=interrupted)
        workers.leases = await stack.enter_async_context(running)
        try:
            yield workers
        finally:
            workers.close()


def _loading(config: Config) -> str:
    """What the slowest part of the start is. Sets this process up for the devices of all policies."""
    devices = set_up_devices(config)
    if config.backend == "local":
        return f"loading the model `{config.model.path}` onto {devices}"
    return f"opening a session at {address_of(config.service)}"


def _workers(config: Config) -> str:
    count = config.agent.workers
    if not count:
        return "agents run on other machines only"
    return f"starting {count} worker{'' if count == 1 else 's'} for the agent"
