"""How do calls of attempts that share one process stay apart? By a context variable that the HTTP client is made to read.

The agent's own client sends its requests as ever; on the way out, those to the gateway (and only those) get the header
`baggage: lightningrl.token=<token>`. Contexts follow asyncio tasks, `asyncio.to_thread`, and the thread pools of LangChain and LangGraph
by themselves; `ThreadPoolExecutor` is taught to hand the identity on. A bare `threading.Thread` is not: it may outlive the attempt
and serve another, and a request refused by the gateway is better than one that is credited to the wrong attempt.
"""

import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

BAGGAGE_KEY = "lightningrl.token"
CLIENTS = ("httpx", "httpx2")
"""httpx serves the SDKs of most vendors; openai ≥ 3 sends through httpx2."""
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose code is running."""

    token: str
    """Of the attempt."""
    gateway: SplitResult
    """The base URL that the token may be sent to."""


identity: ContextVar[Identity | None] = ContextVar("lightningrl_identity", default=None)
"""None: no attempt, or its grader; nothing is attached."""


def assume(token: str, *, base_url: str) -> None:
    """Everything called from here on in this context is the attempt that `token` belongs to."""
    identity.set(Identity(token=token, gateway=urlsplit(base_url)))


def install() -> None:
    """Teach this process's HTTP clients and thread pools. Doing it twice changes nothing."""
    for name in CLIENTS:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue  # then no SDK of this agent sends through it
        _wrap(module.Client, "send", _tagging)
        _wrap(module.AsyncClient, "send", _tagging)
    _wrap(ThreadPoolExecutor, "submit", _handing_on)


def belongs(url: Any, gateway: SplitResult) -> bool:
    """Whether `url` (of httpx) lies under the gateway's base URL: same scheme, host and port, and a path below its path."""
    path = gateway.path.rstrip("/")
    return (
        url.scheme == gateway.scheme
        and url.host == gateway.hostname
        and (url.port or PORTS.get(url.scheme)) == (gateway.port or PORTS.get(gateway.scheme))
        and (url.path == path or url.path.startswith(path + "/"))
    )


def _wrap(owner: type, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    if "__lightningrl__" not in original.__dict__:
        wrapped = functools.wraps(original)(wrapper(original))
        wrapped.__dict__["__lightningrl__"] = True
        setattr(owner, name, wrapped)


def _tagging(send: Callable[..., Any]) -> Callable[..., Any]:
    def tagged(self: Any, request: Any, **options: Any) -> Any:
        who = identity.get()
        if who is not None and belongs(request.url, who.gateway):
            others = [m for m in request.headers.get("baggage", "").split(",") if m.strip() and not m.strip().startswith(BAGGAGE_KEY)]
            request.headers["baggage"] = ",".join([*others, f"{BAGGAGE_KEY}={who.token}"])
        return send(self, request, **options)  # a coroutine, if `send` is async

    return tagged


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
