"""The Lightning Server: gateway + store + engines (+ trainer), put together from a configuration and taken apart again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.config import Config
from lightningrl.engine.base import Engine
from lightningrl.gateway.server import FROZEN, bound, frozen, make_engine_for, serving
from lightningrl.loop import Loop, Watcher
from lightningrl.models.load import export_folder, load_model, load_tokenizer, local_folder
from lightningrl.models.memory import keep_freed_memory
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.runner.pool import WorkerPool
from lightningrl.store import Store, open_store
from lightningrl.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningServer:
    """Everything that serves agents and learns from them, running."""

    config: Config
    folder: Path
    store: Store
    engine: Engine
    """Of the policy that learns."""
    trainer: Trainer

    def loop(self, watcher: Watcher) -> Loop:
        return Loop(self.config, store=self.store, engine=self.engine, trainer=self.trainer, folder=self.folder, watcher=watcher)

    async def version(self) -> int:
        """How many steps have been taken already; 0 for a new run."""
        latest = await self.store.weights(self.config.policy)
        return latest.version if latest else 0


@asynccontextmanager
async def lightning(config: Config, folder: Path) -> AsyncIterator[LightningServer]:
    """Start store, engines, gateway and agents; end them all, in turn, when the block is left.

    What a person may have got wrong is tried first: the port, then the model, then the agent.
    """
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        keep_freed_memory()
        path = Path(local_folder(config.model.path, root=config.root))
        template, tokenizer, model = ChatTemplate.load(path), load_tokenizer(str(path)), load_model(str(path), dtype=config.model.dtype)
        store = await open_store(f"sqlite://{folder.resolve() / 'store.sqlite'}", exclusive=True)
        stack.push_async_callback(store.close)

        engines: dict[str, Engine] = {config.policy: make_engine_for(config, config.policy, folder=path, template=template, model=model)}
        for weights in sorted({route.weights for route in config.routes if route.policy == FROZEN}):
            frozen_folder = Path(local_folder(weights, root=config.root)) if weights else path
            engines[frozen(weights)] = make_engine_for(config, frozen(weights), folder=frozen_folder, template=template)
        for engine in engines.values():
            stack.push_async_callback(engine.close)
        make_trainer = plugins.load(config.trainer.name, kind="trainer", root=config.root)
        trainer = make_trainer(model, config=config.trainer, loss=config.loss, export=partial(export_folder, tokenizer=tokenizer))

        base_url = await stack.enter_async_context(serving(config, sock, store=store, template=template, engines=engines))
        runner = WorkerPool(config.agent, root=config.root, env={"OPENAI_BASE_URL": f"{base_url}/v1"}, log_path=folder / "agents.log")
        await runner.start()
        stack.push_async_callback(runner.close)
        await engines[config.policy].pause()  # until the loop has restored its weights: attempts of an earlier run may be queued
        await stack.enter_async_context(_dispatching(config, store, runner, base_url))
        yield LightningServer(config=config, folder=folder, store=store, engine=engines[config.policy], trainer=trainer)


@asynccontextmanager
async def _dispatching(config: Config, store: Store, runner: WorkerPool, base_url: str) -> AsyncIterator[None]:
    """Run what is queued while the block runs. If that breaks, the block is cancelled and the error handed on."""
    dispatcher = Dispatcher(store=store, runner=runner, base_url=base_url, concurrency=config.agent.concurrency, worker="local")
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
