"""Answer agents, and run the rollouts that are queued: the gateway, the leases, and this machine's worker processes."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightningrl.config import Config
from lightningrl.gateway.app import Gateway
from lightningrl.gateway.assembly import opened
from lightningrl.gateway.server import certificate_of
from lightningrl.leases import StoreLeases, never
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.runner.pool import WorkerPool
from lightningrl.store import Records, Store


@asynccontextmanager
async def running_agents(
    config: Config,
    gateway: Gateway,
    sock: socket.socket,
    folder: Path,
    *,
    store: Store,
    interrupted: Callable[[float], bool] = never,
    recordings: Records | None = None,
) -> AsyncIterator[StoreLeases]:
    """Serve the gateway on the socket, and run the agent on the rollouts of the store, while the block runs.

    `folder` gets agents.log. See `StoreLeases` for `interrupted` and `recordings`.
    """
    async with AsyncExitStack() as stack:
        certificate = certificate_of(config.gateway, root=config.root)
        base_url = await stack.enter_async_context(opened(gateway, sock, certificate=certificate))
        env = {"OPENAI_BASE_URL": f"{base_url}/v1"}
        log_path = folder / "agents.log"
        pool = partial(WorkerPool, config.agent, root=config.root, env=env, secrets=config.secrets(), log_path=log_path)
        grader = await _started(stack, pool(grades=True)) if config.agent.grade == "server" else None
        leases = StoreLeases(
            store,
            lease_s=config.agent.lease_s,
            interrupted=interrupted,
            grade=None if grader is None else grader.grade,
            recordings=recordings,
        )
        stack.push_async_callback(leases.close)  # before the grader's: what it has not graded is no outcome
        await leases.resume()
        local = leases.of("local")
        await local.claim(limit=0, holding=())  # attempts of an earlier process of this run are lost
        work: list[Coroutine[Any, Any, None]] = []
        if config.agent.workers:
            runner = await _started(stack, pool())
            concurrency = config.agent.concurrency
            work.append(Dispatcher(leases=local, runner=runner, base_url=base_url, concurrency=concurrency).run())
        await stack.enter_async_context(_beside([leases.run(), *work]))
        yield leases


async def _started(stack: AsyncExitStack, pool: WorkerPool) -> WorkerPool:
    await pool.start()
    stack.push_async_callback(pool.close)
    return pool


@asynccontextmanager
async def _beside(work: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run the work while the block runs. If some of it fails, cancel the block and raise the error."""
    block = asyncio.current_task()
    assert block is not None
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    for task in tasks:
        task.add_done_callback(lambda ended: None if ended.cancelled() else block.cancel())
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
