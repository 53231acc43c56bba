"""Whose call is it, and in which role? What an agent's SDK was able to put into a request, wherever that is.

The attempt's token, in this order: `baggage: lightningrl.token=…` (set per task by instrumentation), `/r/<token>/…` in
the path, the API key in any vendor's header. Session headers come last: they name a conversation and open nothing by
themselves (see `Visitors`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from lightningrl.tracing.mark import BAGGAGE_KEY

AGENT = "gen_ai.agent.name"
"""As OpenTelemetry's semantic conventions name it."""
KEYS = (b"authorization", b"x-api-key", b"x-goog-api-key", b"api-key")
"""OpenAI and most others; Anthropic; Google; Azure."""
SESSIONS = (
    b"x-claude-code-session-id",
    b"session_id",
    b"session-id",
    b"x-session-id",
    b"x-session-affinity",
    b"conversation_id",
    b"x-litellm-session-id",
)
"""What coding agents and proxies send of their own accord."""
READ = frozenset({b"baggage", b"x-agent-name", b"x-stainless-retry-count", b"host", b"origin", *KEYS, *SESSIONS})
VERSION = re.compile(r"^(?:/v\d+(?:alpha|beta)?\d*)+(?=/|$)")
"""More than once: where a base URL has one and an SDK adds its own."""
SLASHES = re.compile("//+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request, as far as it says."""

    token: str | None
    """None if it carries none at all."""
    session: str | None = None
    """The client's own name for this conversation; None if it gives none."""
    agent: str = ""
    """The agent's name; "" if nothing gives it."""
    retries: int = 0
    """How often its SDK has sent this request before."""
    peer: str = ""
    """The address that the connection comes from; "" if unknown."""
    host: str = ""
    """The `Host` header, the name under which it has found this server; "" if none was sent."""
    origin: str | None = None
    """The web page that has sent it; None: no browser did."""


def caller_of(scope: Mapping[str, Any], *, path_token: str | None) -> Caller:
    """Of an ASGI request."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in READ:
            text = value.decode("latin-1")
            found[name] = (
                f"{found[name]},{text}" if name == b"baggage" and name in found else text
            )  # a list, also in several headers
    baggage = _members(found.get(b"baggage", ""))
    retries = found.get(b"x-stainless-retry-count", "0")
    return Caller(
        token=baggage.get(BAGGAGE_KEY) or path_token or _key(found, scope["query_string"].decode("latin-1")),
        session=next((found[name] for name in SESSIONS if found.get(name)), None),
        agent=baggage.get(AGENT) or found.get(b"x-agent-name", ""),
        retries=int(retries) if retries.isascii() and retries.isdigit() and len(retries) < 9 else 0,
        peer=(scope.get("client") or ("",))[0],
        host=found.get(b"host", ""),
        origin=found.get(b"origin"),
    )


def is_local(caller: Caller) -> bool:
    """Does this machine's user ask? A page of any web site can send requests from here, too: its browser names its
    origin, or, if the page has given its own name this machine's address, a foreign host.
    """
    pages = () if caller.origin is None else (caller.origin,)
    return _is_loopback(caller.peer) and all(_is_loopback(_hostname(url)) for url in (f"//{caller.host}", *pages))


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or (
        isinstance(address, IPv6Address) and address.ipv4_mapped is not None and address.ipv4_mapped.is_loopback
    )


def split_path(path: str) -> tuple[str | None, str]:
    """`/r/<token>/v1/chat/completions` → (token, `/chat/completions`); either part in front may be missing, and slashes
    be doubled.
    """
    token, path = None, f"/{path.lstrip('/')}"
    if path.startswith("/r/"):
        token, _, rest = path[3:].partition("/")
        path = f"/{rest}"
    path = VERSION.sub("", SLASHES.sub("/", path))
    return token or None, path.rstrip("/") or "/"


def _members(header: str) -> dict[str, str]:
    """W3C baggage: `key=value;property, key=value`, values percent-encoded."""
    pairs = (member.partition(";")[0].partition("=") for member in header.split(",")) if header else ()
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


def _key(found: dict[bytes, str], query: str) -> str | None:
    for name in KEYS:
        scheme, _, value = found.get(name, "").strip().rpartition(" ")
        if value and scheme.strip().lower() == ("bearer" if name == b"authorization" else ""):
            return value
    return parse_qs(query).get("key", [None])[0] if "key=" in query else None  # Google's older clients
