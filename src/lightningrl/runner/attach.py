"""Attribute calls to attempts that share one process, through a context variable that patched HTTP clients read.

Every request to the gateway, and no other, gets the header `baggage: lightningrl.token=<token>`. Every OpenTelemetry
span gets a mark when it starts.

The context variable follows asyncio tasks, `asyncio.to_thread`, and the thread pools of LangChain and LangGraph.
`ThreadPoolExecutor` is patched to pass it on. A bare `threading.Thread` is not patched: it may outlive its attempt and
serve another. Better the gateway refuses a request than credits it to the wrong attempt.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from lightningrl.errors import UserError
from lightningrl.runner.patching import Patches, patch, wrap
from lightningrl.runner.tool_playback import ToolPlayback
from lightningrl.tracing.mark import BAGGAGE_KEY, MARK, mark_of
from lightningrl.types import hash_token

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The attempt that the running code belongs to."""

    token: str
    """The attempt's token."""
    gateway: SplitResult
    """The token is sent only to URLs below this one. Without `/v1`."""
    attempt_id: str = ""
    """"" if only the token is known."""
    tools: ToolPlayback | None = None
    """The tool results that the attempt plays back; None: the gateway has not been asked."""


identity: ContextVar[Identity | None] = ContextVar("lightningrl_identity", default=None)
"""None: no attempt, or its grader. Requests and spans are then left alone."""


class Attached:
    """Result of `attach`: lasts as long as its `with` block, or, without one, as long as the calling context."""

    def __init__(self, caller: Identity) -> None:
        self._before = identity.get()
        identity.set(caller)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        identity.set(self._before)


def attach(token: str | None = None, *, base_url: str | None = None, attempt_id: str = "") -> Attached:
    """Attribute all further calls of this asyncio task or thread to the attempt of `token`.

    Use it for rollouts that run concurrently in one process. They may share clients: httpx, httpx2, aiohttp, requests,
    and every SDK built on them. `token` defaults to OPENAI_API_KEY, `base_url` to OPENAI_BASE_URL. With `attempt_id`,
    the gateway can also attribute spans that arrive before the attempt's first call.

        with lightningrl.attach(token):
            await agent.run(task)
    """
    base_url = base_url or os.environ.get("OPENAI_BASE_URL", "")
    token = token or os.environ.get("OPENAI_API_KEY", "")
    if not token:
        raise UserError("no token to attach", hint="pass the attempt's token, or set OPENAI_API_KEY")
    if not urlsplit(base_url).hostname:
        raise UserError(f"`{base_url}` is not the URL of a gateway", hint="pass `base_url`, or set OPENAI_BASE_URL")
    install()
    return Attached(Identity(token=token, gateway=gateway_of(base_url), attempt_id=attempt_id))


def gateway_of(base_url: str) -> SplitResult:
    """The gateway's URL, from an SDK's base URL: `http://host:port/v1` → `http://host:port`."""
    url = urlsplit(base_url)
    return url._replace(path=url.path.rstrip("/").removesuffix("/v1"), query="", fragment="")


def install() -> None:
    """Patch the HTTP clients and thread pools of this process, now or when they are imported. Idempotent."""
    wrap(ThreadPoolExecutor, "submit", _handing_on)
    patch(CLIENTS)


def belongs(url: str, gateway: SplitResult) -> bool:
    """Whether `url` is below the gateway's URL: same scheme, host and port, and a path below its path."""
    there, path = urlsplit(url), gateway.path.rstrip("/")
    return (
        there.scheme == gateway.scheme
        and there.hostname == gateway.hostname
        and (there.port or PORTS.get(there.scheme)) == (gateway.port or PORTS.get(gateway.scheme))
        and (there.path == path or there.path.startswith(path + "/"))
    )


def _patch_httpx(module: ModuleType) -> None:
    """httpx serves the SDKs of most vendors; openai ≥ 3 and anthropic ≥ 2 send through httpx2."""
    wrap(module.Client, "send", _tagging)
    wrap(module.AsyncClient, "send", _tagging)


def _patch_aiohttp(module: ModuleType) -> None:
    wrap(module.ClientSession, "_request", _tagging_aiohttp)


def _patch_requests(module: ModuleType) -> None:
    wrap(module.Session, "send", _tagging)


def _patch_opentelemetry(module: ModuleType) -> None:
    wrap(module.Tracer, "start_span", _marking)


CLIENTS: Patches = {
    "httpx": _patch_httpx,
    "httpx2": _patch_httpx,
    "aiohttp": _patch_aiohttp,
    "requests": _patch_requests,
    "opentelemetry.sdk.trace": _patch_opentelemetry,
}


def _tagging(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `send(request)` of httpx and requests."""

    def tagged(self: Any, request: Any, **options: Any) -> Any:
        caller = identity.get()
        if caller is not None and belongs(str(request.url), caller.gateway):
            request.headers["baggage"] = _baggage(request.headers.get("baggage"), caller.token)
        return send(self, request, **options)  # a coroutine, if `send` is async

    return tagged


def _tagging_aiohttp(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_request(method, url, headers=…)` of aiohttp, which every method of a session calls."""

    def tagged(self: Any, method: str, url: Any, **options: Any) -> Any:
        caller = identity.get()
        if caller is not None and belongs(str(self._build_url(url)), caller.gateway):
            headers = self._prepare_headers(options.pop("headers", None))  # with the session's own
            headers["baggage"] = _baggage(headers.get("baggage"), caller.token)
            options["headers"] = headers
        return send(self, method, url, **options)  # a coroutine

    return tagged


def _marking(start_span: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `start_span` of OpenTelemetry, whose exporters send the spans of many attempts together."""

    def marked(self: Any, *args: Any, **options: Any) -> Any:
        span, caller = start_span(self, *args, **options), identity.get()
        if caller is not None:
            span.set_attribute(MARK, mark_of(hash_token(caller.token), attempt_id=caller.attempt_id))
        return span

    return marked


def _baggage(there: str | None, token: str) -> str:
    """A W3C baggage header with the token; other members stay."""
    others = [
        member for member in (there or "").split(",") if member.strip() and not member.strip().startswith(BAGGAGE_KEY)
    ]
    return ",".join([*others, f"{BAGGAGE_KEY}={quote(token, safe='')}"])


def _handing_on(submit: Callable[..., Any]) -> Callable[..., Any]:
    def handed_on(self: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, functools.partial(_as, identity.get(), function), *args, **kwargs)

    return handed_on


def _as(caller: Identity | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before = identity.set(caller)
    try:
        return function(*args, **kwargs)
    finally:
        identity.reset(before)
