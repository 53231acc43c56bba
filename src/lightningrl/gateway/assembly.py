"""How is a gateway put together? From its parts, or from a recipe's settings."""

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit

from lightningrl import plugins
from lightningrl.chat import ChatTemplate
from lightningrl.config import Config, GatewayConfig
from lightningrl.engine.base import Engine
from lightningrl.errors import LightningError
from lightningrl.gateway import routing
from lightningrl.gateway.app import Gateway
from lightningrl.gateway.backend import Backend
from lightningrl.gateway.endpoints import Endpoints
from lightningrl.gateway.hosts import Hosts
from lightningrl.gateway.limits import NO_LIMITS, Limits
from lightningrl.gateway.rewards import Rewards
from lightningrl.gateway.routing import Route
from lightningrl.gateway.server import BACKLOG, Certificate, listening
from lightningrl.gateway.sessions import Sessions
from lightningrl.gateway.tool_results import ToolResults
from lightningrl.gateway.traces import Traces
from lightningrl.gateway.upstream import Upstream
from lightningrl.gateway.visitors import Visitors
from lightningrl.gateway.workers import Workers
from lightningrl.store import Records, Store
from lightningrl.tracing.tool_results import Tools
from lightningrl.types import Call


def make_gateway(
    config: Config,
    *,
    store: Store,
    template: ChatTemplate,
    engines: Mapping[str, Engine],
    visitors: Visitors | None = None,
    workers: Workers | None = None,
    name: str = "",
    recordings: Records | None = None,
    cassette: Sequence[Call] = (),
) -> Gateway:
    """The gateway that a recipe describes. See `create_app` for the arguments."""
    return create_app(
        store=store,
        chat=template,
        engines=engines,
        routes=[routing.configured(route) for route in config.routes],
        upstreams=[Upstream(name, url=u.url, key_env=u.key_env, model=u.model) for name, u in config.upstreams.items()],
        embeddings=config.gateway.embeddings,
        seed=config.seed,
        max_length=config.engine.max_length,
        history=config.gateway.history,
        strict=config.gateway.strict,
        visitors=visitors,
        workers=workers,
        name=name,
        hosts=_hosts(config.gateway),
        limits=Limits(calls=config.agent.max_calls, tokens=config.agent.max_tokens, bytes=config.agent.max_bytes),
        may_reward=config.agent.may_reward,
        shared_processes=config.agent.entry is not None,
        recordings=recordings,
        cassette=cassette,
        replay_tools=config.replay.tools,
    )


def _hosts(config: GatewayConfig) -> list[str]:
    """The names of the server that follow from its settings."""
    return [*config.hosts, config.host, urlsplit(config.public_url).hostname or ""]


@asynccontextmanager
async def opened(
    gateway: Gateway, sock: socket.socket, *, certificate: Certificate | None = None
) -> AsyncIterator[str]:
    """Serve the gateway on a socket while the block runs. Yields its base URL for programs of this machine. With a
    `certificate`, they are served on the loopback instead: its name is not theirs.
    """
    async with AsyncExitStack() as stack:
        for upstream in gateway.upstreams.values():
            stack.push_async_callback(upstream.close)
        if certificate is not None:
            await stack.enter_async_context(listening(gateway, sock, certificate=certificate))
            sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
        yield await stack.enter_async_context(listening(gateway, sock))


def create_app(
    *,
    store: Store,
    chat: ChatTemplate,
    engines: Mapping[str, Engine],
    routes: Sequence[Route] = (Route(),),
    upstreams: Sequence[Upstream] = (),
    embeddings: str = "",
    seed: int = 0,
    max_length: int,
    history: Literal["exact", "template"] = "exact",
    strict: bool = True,
    dialects: Sequence[str] | None = None,
    visitors: Visitors | None = None,
    workers: Workers | None = None,
    name: str = "",
    hosts: Sequence[str] = (),
    limits: Limits = NO_LIMITS,
    may_reward: bool = False,
    shared_processes: bool = False,
    recordings: Records | None = None,
    cassette: Sequence[Call] = (),
    replay_tools: Tools = "rerun",
) -> Gateway:
    """The ASGI application. `engines`: by policy. `max_length`: tokens of prompt and completion that fit into them.

    `embeddings` names the upstream for embedding requests ("upstreams.NAME"; "": none). `strict`: the arguments of
    strict tools are constrained to their schema. `visitors` admits callers without a token. `name`: this server's; the
    attempts of other servers before the same store are refused. `hosts`: names of this server, see `Hosts`. `limits`:
    of an attempt. `may_reward`: agents may reward their own calls. `shared_processes`: attempts share a process, so its
    telemetry may come without a token. `recordings`: has the attempts that branches repeat; None: `store`.
    `cassette`: recorded calls that answer the requests of all other attempts; empty: they are sampled.
    `replay_tools`: the setting `replay.tools`. For `history`, see `ConversationTree`. Raises `LightningError` if a
    route leads to an unknown policy.
    """
    others = {f"upstreams.{upstream.name}": upstream for upstream in upstreams}
    missing = sorted({route.policy for route in routes} - set(engines) - set(others))
    if missing and not cassette:
        raise LightningError(f"no engine for policy `{missing[0]}`", hint=f"engines: {', '.join([*engines, *others])}")
    backend = Backend(store=store, template=chat, engines=engines, max_length=max_length, strict=strict)
    spoken = [plugins.load(name, kind="dialect")() for name in dialects or plugins.names("dialect")]
    sessions = Sessions(
        store,
        chat,
        spoken,
        history=history,
        seed=seed,
        name=name,
        limits=limits,
        visitors=visitors,
        recordings=recordings,
        cassette=cassette,
    )
    prefixes = [dialect.id_prefix for dialect in spoken]
    endpoints = Endpoints(
        sessions,
        traces=Traces(store, sessions, prefixes=prefixes, shared=shared_processes),
        rewards=Rewards(store, sessions, allowed=may_reward),
        tools=ToolResults(sessions, recordings or store, tools=replay_tools),
        embeddings=others.get(embeddings),
        recorded=bool(cassette),
        workers=workers,
    )
    return Gateway(
        backend,
        routes=routes,
        dialects=spoken,
        sessions=sessions,
        upstreams=others,
        endpoints=endpoints,
        hosts=Hosts(hosts),
    )
