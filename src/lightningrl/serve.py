"""The Lightning Server: gateway + store + engines (+ trainer), put together from a configuration and taken apart again."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.checkpoints import Checkpoints
from lightningrl.config import Config
from lightningrl.data.tasks import derived_seed
from lightningrl.engine.base import Engine
from lightningrl.engines import make_engine, make_engines, model_paths
from lightningrl.gateway.assembly import make_gateway, opened
from lightningrl.gateway.scripted import PLAIN
from lightningrl.gateway.server import bound
from lightningrl.learner import Learner, needs_critic
from lightningrl.loop import Loop
from lightningrl.models.dense import DenseModel
from lightningrl.models.load import export_folder, load_model, load_tokenizer, local_folder
from lightningrl.models.memory import keep_freed_memory
from lightningrl.progress import Watcher
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.runner.pool import WorkerPool
from lightningrl.store import Store, open_store

Starting: TypeAlias = Callable[[str], None]
"""Is told, in words for a person, what takes a while now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningServer:
    """Everything that serves agents and learns from them, running."""

    config: Config
    folder: Path
    store: Store
    template: ChatTemplate
    learners: tuple[Learner, ...]
    """The policies that learn, in the order of the recipe."""
    checkpoints: Checkpoints

    def loop(self, watcher: Watcher) -> Loop:
        return Loop(
            self.config,
            store=self.store,
            learners=self.learners,
            checkpoints=self.checkpoints,
            folder=self.folder,
            watcher=watcher,
        )

    async def version(self) -> int:
        """How many steps a run that goes on has behind it; 0 for a new run."""
        return max(await self.checkpoints.newest(), 0)

    async def export(self, folder: Path) -> None:
        """Write the policy as it is now into `folder`; several go into folders of their names in it."""
        for learner in self.learners:
            await learner.export(folder / learner.name if len(self.learners) > 1 else folder)


@asynccontextmanager
async def lightning(
    config: Config, folder: Path, *, starting: Starting = lambda what: None
) -> AsyncIterator[LightningServer]:
    """Start store, engines, gateway and agents; end them all, in turn, when the block is left.

    What a person may have got wrong is tried first: the port, then the model, then the agent. `starting` is told each
    of them as it begins.
    """
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        keep_freed_memory()
        starting(f"loading the model `{config.model.path}`")
        paths = dict.fromkeys([config.model.path, *model_paths(config).values()])
        folders = {path: Path(local_folder(path, root=config.root)) for path in paths}
        template = ChatTemplate.load(folders[config.model.path])
        models = _models(config, folders)
        store = await open_store(f"sqlite://{folder.resolve() / 'store.sqlite'}", exclusive=True)
        stack.push_async_callback(store.close)

        starting(f"starting the engine `{config.engine.name}`")
        engines = make_engines(config, folders, template=template, models=models)
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        compute = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="trainer"))
        learners = _learners(config, models, engines, folders, compute=compute, folder=folder)
        for learner in learners:
            await (
                learner.engine.pause()
            )  # until the loop has restored its weights: attempts of an earlier run may be queued
        starting(_workers(config))
        await stack.enter_async_context(_agents(config, sock, folder, store=store, template=template, engines=engines))
        checkpoints = Checkpoints(folder, store=store, learners=learners)
        yield LightningServer(
            config=config, folder=folder, store=store, template=template, learners=learners, checkpoints=checkpoints
        )


@asynccontextmanager
async def relaying(
    config: Config, folder: Path, *, starting: Starting = lambda what: None
) -> AsyncIterator[LightningServer]:
    """The same without a model: every route leads to another server, or to the script that `engine.name` names."""
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        template = ChatTemplate.load(PLAIN)
        played = sorted({route.policy for route in config.routes} & config.learners().keys())
        engines = {policy: make_engine(config, policy, folder=PLAIN, template=template) for policy in played}
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        store = await open_store(f"sqlite://{folder.resolve() / 'store.sqlite'}", exclusive=True)
        stack.push_async_callback(store.close)
        starting(_workers(config))
        await stack.enter_async_context(_agents(config, sock, folder, store=store, template=template, engines=engines))
        checkpoints = Checkpoints(folder, store=store, learners=())
        yield LightningServer(
            config=config, folder=folder, store=store, template=template, learners=(), checkpoints=checkpoints
        )


@asynccontextmanager
async def _agents(
    config: Config,
    sock: socket.socket,
    folder: Path,
    *,
    store: Store,
    template: ChatTemplate,
    engines: Mapping[str, Engine],
) -> AsyncIterator[None]:
    """Serve them, and run what is queued."""
    async with AsyncExitStack() as stack:
        gateway = make_gateway(config, store=store, template=template, engines=engines)
        base_url = await stack.enter_async_context(opened(gateway, sock))
        env = {"OPENAI_BASE_URL": f"{base_url}/v1"}
        runner = WorkerPool(
            config.agent, root=config.root, env=env, secrets=config.secrets(), log_path=folder / "agents.log"
        )
        await runner.start()
        stack.push_async_callback(runner.close)
        await stack.enter_async_context(_dispatching(config, store, runner, base_url))
        yield


def _workers(config: Config) -> str:
    count = config.agent.workers
    return f"starting {count} worker{'s' if count > 1 else ''} for the agent"


def _models(config: Config, folders: Mapping[str, Path]) -> dict[str, DenseModel]:
    """A model for each policy that learns. Adapters of one model share its weights, which nobody changes."""
    bases: dict[tuple[str, str], DenseModel] = {}
    models: dict[str, DenseModel] = {}
    for index, (name, learner) in enumerate(config.learners().items()):
        model = learner.model
        path = str(folders[model.path])
        if model.lora_rank == 0:
            models[name] = load_model(path, dtype=model.dtype)
            continue
        from lightningrl.models.lora import with_adapter  # peft takes longer to import than everything else

        if (path, model.dtype) not in bases:
            bases[path, model.dtype] = load_model(path, dtype=model.dtype)
        models[name] = with_adapter(
            bases[path, model.dtype], rank=model.lora_rank, seed=derived_seed(config.seed, "adapter", index)
        )
    return models


def _learners(
    config: Config,
    models: Mapping[str, DenseModel],
    engines: Mapping[str, Engine],
    folders: Mapping[str, Path],
    *,
    compute: Executor,
    folder: Path,
) -> tuple[Learner, ...]:
    made: list[Learner] = []
    for name, settings in config.learners().items():
        make_trainer = plugins.load(settings.trainer.name, kind="trainer", root=config.root)
        tokenizer = load_tokenizer(str(folders[settings.model.path]))
        export = partial(export_folder, tokenizer=tokenizer)
        learner = Learner(
            name,
            settings,
            engine=engines[name],
            trainer=make_trainer(
                models[name], config=settings.trainer, loss=settings.loss, export=export, critic=needs_critic(settings)
            ),
            compute=compute,
            folder=folder,
            checkpoints="checkpoints/step-{:05d}" + (f"/{name}" if len(models) > 1 else ""),
            kind="full" if models[name].adapter is None else "lora",
            routes=config.routes,
            root=config.root,
        )
        made.append(learner)
    return tuple(made)


@asynccontextmanager
async def _dispatching(config: Config, store: Store, runner: WorkerPool, base_url: str) -> AsyncIterator[None]:
    """Run what is queued while the block runs. If that breaks, the block is cancelled and the error handed on."""
    dispatcher = Dispatcher(
        store=store, runner=runner, base_url=base_url, concurrency=config.agent.concurrency, worker="local"
    )
    block = asyncio.current_task()
    assert block is not None
    task = asyncio.create_task(dispatcher.run())
    task.add_done_callback(lambda ended: None if ended.cancelled() else block.cancel())
    try:
        yield
    finally:
        task.cancel()
        (broken,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(broken, Exception):
            raise broken
