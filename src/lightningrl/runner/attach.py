"""How do calls of attempts that share one process stay apart? By a context variable that the HTTP client is made to
read.

The agent's own client sends its requests as ever; on the way out, those to the gateway (and only those) get the header
`baggage: lightningrl.token=<token>`. Spans of OpenTelemetry get a mark as they begin. Contexts follow asyncio tasks,
`asyncio.to_thread`, and the thread pools of LangChain and LangGraph by themselves; `ThreadPoolExecutor` is taught to
hand the identity on. A bare `threading.Thread` is not: it may outlive the attempt and serve another, and a request
refused by the gateway is better than one that is credited to the wrong attempt.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from lightningrl.errors import UserError
from lightningrl.tracing.mark import BAGGAGE_KEY, MARK, mark_of
from lightningrl.types import hash_token

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose code is running."""

    token: str
    """Of the attempt."""
    gateway: SplitResult
    """The token may be sent to what lies below this URL; it has no `/v1`."""
    attempt_id: str = ""
    """"" where only the token is known."""


identity: ContextVar[Identity | None] = ContextVar("lightningrl_identity", default=None)
"""None: no attempt, or its grader; nothing is attached."""


class Attached:
    """What `attach` returns. As a context manager it ends with its block; otherwise with the context it was called in."""

    def __init__(self, who: Identity) -> None:
        self._before = identity.get()
        identity.set(who)

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *_: object) -> None:
        identity.set(self._before)


def attach(token: str | None = None, *, base_url: str | None = None, attempt_id: str = "") -> Attached:
    """From here on, in this asyncio task or thread, every call to the gateway belongs to the attempt of `token`.

    For rollouts that run at the same time in one process, through clients they may share: httpx, httpx2, aiohttp and
    requests, and all SDKs on top of them. Defaults are OPENAI_API_KEY and OPENAI_BASE_URL. With its `attempt_id`, spans
    find their attempt before its first call, too.

        with lightningrl.attach(token):
            await agent.run(task)
    """
    base_url = base_url or os.environ.get("OPENAI_BASE_URL", "")
    token = token or os.environ.get("OPENAI_API_KEY", "")
    if not token:
        raise UserError("no token to attach", hint="give the attempt's, or set OPENAI_API_KEY")
    if not urlsplit(base_url).hostname:
        raise UserError(f"`{base_url}` is no URL of a gateway", hint="give `base_url`, or set OPENAI_BASE_URL")
    install()
    return Attached(Identity(token=token, gateway=gateway_of(base_url), attempt_id=attempt_id))


def gateway_of(base_url: str) -> SplitResult:
    """The gateway behind an SDK's base URL: all its dialects lie below `http://host:port` of `http://host:port/v1`."""
    url = urlsplit(base_url)
    return url._replace(path=url.path.rstrip("/").removesuffix("/v1"), query="", fragment="")


def install() -> None:
    """Teach this process's HTTP clients and thread pools, also those that are imported later. Doing it twice changes
    nothing.
    """
    _wrap(ThreadPoolExecutor, "submit", _handing_on)
    for name, teach in CLIENTS.items():
        if name in sys.modules:
            teach(importlib.import_module(name))  # waits for a thread that is importing it right now
    if not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


def belongs(url: str, gateway: SplitResult) -> bool:
    """Whether `url` lies under the gateway's URL: same scheme, host and port, and a path below its path."""
    there, path = urlsplit(url), gateway.path.rstrip("/")
    return (
        there.scheme == gateway.scheme
        and there.hostname == gateway.hostname
        and (there.port or PORTS.get(there.scheme)) == (gateway.port or PORTS.get(gateway.scheme))
        and (there.path == path or there.path.startswith(path + "/"))
    )


def _teach_httpx(module: ModuleType) -> None:
    """httpx serves the SDKs of most vendors; openai ≥ 3 and anthropic ≥ 2 send through httpx2."""
    _wrap(module.Client, "send", _tagging)
    _wrap(module.AsyncClient, "send", _tagging)


def _teach_aiohttp(module: ModuleType) -> None:
    _wrap(module.ClientSession, "_request", _tagging_aiohttp)


def _teach_requests(module: ModuleType) -> None:
    _wrap(module.Session, "send", _tagging)


def _teach_opentelemetry(module: ModuleType) -> None:
    _wrap(module.Tracer, "start_span", _marking)


CLIENTS: Mapping[str, Callable[[ModuleType], None]] = {
    "httpx": _teach_httpx,
    "httpx2": _teach_httpx,
    "aiohttp": _teach_aiohttp,
    "requests": _teach_requests,
    "opentelemetry.sdk.trace": _teach_opentelemetry,
}


class _OnImport(MetaPathFinder):
    """Teaches a client as soon as it has been imported. What finds and loads it is left as it is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in CLIENTS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_teach(module: ModuleType) -> None:
                load(module)
                if module.__name__ == fullname:  # a loader may serve more than one module
                    CLIENTS[fullname](module)

            spec.loader.exec_module = load_and_teach
        return spec


def _wrap(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    if "__lightningrl__" not in original.__dict__:
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped.__dict__["__lightningrl__"] = True
        setattr(owner, name, wrapped)


def _tagging(send: Callable[..., Any]) -> Callable[..., Any]:
    """Of httpx and requests: the request is an object that is about to be sent."""

    def tagged(self: Any, request: Any, **options: Any) -> Any:
        who = identity.get()
        if who is not None and belongs(str(request.url), who.gateway):
            request.headers["baggage"] = _baggage(request.headers.get("baggage"), who.token)
        return send(self, request, **options)  # a coroutine, if `send` is async

    return tagged


def _tagging_aiohttp(send: Callable[..., Any]) -> Callable[..., Any]:
    """Of aiohttp: `_request(method, url, headers=…)` is what every verb of a session comes down to."""

    def tagged(self: Any, method: str, url: Any, **options: Any) -> Any:
        who = identity.get()
        if who is not None and belongs(str(self._build_url(url)), who.gateway):
            headers = self._prepare_headers(options.pop("headers", None))  # the session's own among them
            headers["baggage"] = _baggage(headers.get("baggage"), who.token)
            options["headers"] = headers
        return send(self, method, url, **options)  # a coroutine

    return tagged


def _marking(start_span: Callable[..., Any]) -> Callable[..., Any]:
    """Of OpenTelemetry: exporters send spans of many attempts together, from a thread of their own."""

    def marked(self: Any, *args: Any, **options: Any) -> Any:
        span, who = start_span(self, *args, **options), identity.get()
        if who is not None:
            span.set_attribute(MARK, mark_of(hash_token(who.token), attempt_id=who.attempt_id))
        return span

    return marked


def _baggage(there: str | None, token: str) -> str:
    """W3C baggage: what others have put there stays."""
    others = [
        member for member in (there or "").split(",") if member.strip() and not member.strip().startswith(BAGGAGE_KEY)
    ]
    return ",".join([*others, f"{BAGGAGE_KEY}={quote(token, safe='')}"])


def _handing_on(submit: Callable[..., Any]) -> Callable[..., Any]:
    def handed_on(self: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, functools.partial(_as, identity.get(), function), *args, **kwargs)

    return handed_on


def _as(who: Identity | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before = identity.set(who)
    try:
        return function(*args, **kwargs)
    finally:
        identity.reset(before)
