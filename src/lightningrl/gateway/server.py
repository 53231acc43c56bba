"""The gateway, listening: what `train` and `run` share. Knows no trainer, and loads no torch."""

import asyncio
import contextlib
import gc
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from lightningrl.chat import ChatTemplate
from lightningrl.config import Config, GatewayConfig, RouteConfig
from lightningrl.engine.base import Engine, EngineSetup
from lightningrl.errors import UserError
from lightningrl.gateway.app import Gateway, create_app
from lightningrl.gateway.connection import Connection
from lightningrl.gateway.relay import Upstream
from lightningrl.gateway.routing import Route
from lightningrl.gateway.scripted import make_engine
from lightningrl.gateway.sessions import Visitors
from lightningrl.store import Store

FROZEN = "frozen"
"""The policy that answers with fixed weights: those that training started from, unless a route names others."""
GARBAGE = 20_000
"""Objects between two looks for garbage; the usual 700 costs a busy gateway a tenth of its CPU (benchmarks/gateway.py).
"""
OPEN_FILES = 65536
"""Files and sockets that the process asks to have open, if the system lets it."""
KEPT_ALIVE_S = 120
"""Idle connections are kept for longer than clients keep them in their pools: whoever closes first must not be us."""
ENDING_S = 5
"""What requests get to end when the server does."""


@asynccontextmanager
async def serving(
    config: Config,
    sock: socket.socket,
    *,
    store: Store,
    template: ChatTemplate,
    engines: Mapping[str, Engine],
    visitors: Visitors | None = None,
) -> AsyncIterator[str]:
    """The gateway, listening while the block runs; yields its base URL. `visitors` lets callers in who have no token."""
    gateway = make_gateway(config, store=store, template=template, engines=engines, visitors=visitors)
    async with opened(gateway, sock) as base_url:
        yield base_url


def make_gateway(
    config: Config,
    *,
    store: Store,
    template: ChatTemplate,
    engines: Mapping[str, Engine],
    visitors: Visitors | None = None,
) -> Gateway:
    return create_app(
        store=store,
        chat=template,
        engines=engines,
        routes=[_route(route) for route in config.routes],
        upstreams=[Upstream(name, url=u.url, key_env=u.key_env, model=u.model) for name, u in config.upstreams.items()],
        embeddings=config.gateway.embeddings,
        seed=config.seed,
        max_length=config.engine.max_length,
        history=config.gateway.history,
        strict=config.gateway.strict,
        visitors=visitors,
        may_reward=config.agent.may_reward,
        shared_processes=config.agent.entry is not None,
    )


@asynccontextmanager
async def opened(gateway: Gateway, sock: socket.socket) -> AsyncIterator[str]:
    """The gateway, listening while the block runs; yields its base URL."""
    async with AsyncExitStack() as stack:
        for upstream in gateway.upstreams.values():
            stack.push_async_callback(upstream.close)
        yield await stack.enter_async_context(listening(gateway, sock))


def make_engine_for(
    config: Config, policy: str, *, folder: Path, template: ChatTemplate, model: Any = None, root: Path | None = None
) -> Engine:
    """The engine that answers for `policy`. `model` is what a trainer in this process updates; `root` is where
    `engine.name` is imported from, the recipe's folder unless it is given.
    """
    learners = config.learners()
    shared = policy in learners and all(
        learner.model.lora_rank for learner in learners.values()
    )  # one server holds many adapters
    if config.engine.urls and policy != next(iter(learners)) and not shared:
        hint = 'start a server for it, name it in `[upstreams.NAME]`, and let the route say `policy = "upstreams.NAME"`'
        raise UserError(
            f"engine `{config.engine.name}` serves one model, a route asks for `{policy}` as well", hint=hint
        )
    setup = EngineSetup(
        policy=policy,
        config=config.engine,
        folder=folder,
        dtype=config.model.dtype,
        decode=template.decode,
        turn_end_id=template.turn_end_id,
        model=model,
    )
    return make_engine(config.engine.name, setup, template=template, root=root or config.root)


@contextlib.contextmanager
def bound(config: GatewayConfig) -> Iterator[socket.socket]:
    try:
        sock = socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        where = f"{config.host}:{config.port}"
        raise UserError(
            f"cannot listen on `{where}`: {error.strerror}", hint="set `gateway.port=0` to take any free port"
        ) from error
    with sock:
        yield sock


@asynccontextmanager
async def listening(app: Any, sock: socket.socket) -> AsyncIterator[str]:
    """Serve `app` while the block runs; yields its base URL."""
    settings = uvicorn.Config(
        app,
        log_level="error",  # a client that asks for a websocket is told so in its answer
        lifespan="off",
        access_log=False,
        http=Connection,
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEPT_ALIVE_S,
        timeout_graceful_shutdown=ENDING_S,
    )
    _open_more_files()
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE, *before[1:])
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        host, port = sock.getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        gc.set_threshold(*before)
        server.should_exit = True
        await task
        await asyncio.gather(
            *server.server_state.tasks, return_exceptions=True
        )  # what was cut short is still being recorded


def _open_more_files() -> None:
    """A thousand streams are two thousand sockets, more than a process may have open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """Leaves signals to the process it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _route(route: RouteConfig) -> Route:
    policy = frozen(route.weights) if route.policy == FROZEN else route.policy
    return Route(
        model=route.model,
        caller=route.caller,
        system=route.system,
        fingerprint=route.fingerprint,
        agent=route.agent,
        policy=policy,
    )


def frozen(weights: str) -> str:
    """What the policy is called that answers with fixed weights."""
    return f"{FROZEN}:{weights}" if weights else FROZEN
