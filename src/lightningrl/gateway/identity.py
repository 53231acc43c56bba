"""Which attempt and which agent sent a request? Reads the token and the agent's name from path and headers.

The token is looked for in this order: `baggage: lightningrl.token=…` (set per task by instrumentation), `/r/<token>/…`
in the path, the API key in any vendor's header. Session headers name a conversation, but authenticate nothing (see
`Visitors`).
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
"""Session headers that coding agents and proxies send."""
REQUEST = b"x-lightningrl-request"
"""The name that a client gave to its request. It may send the request again under this name, also to a restarted
server, and gets the same answer.
"""
LONGEST_NAME = 64
"""Characters of the name of a request. A longer one is ignored."""
READ = frozenset(
    {b"baggage", b"x-agent-name", b"x-stainless-retry-count", b"host", b"origin", REQUEST, *KEYS, *SESSIONS}
)
VERSION = re.compile(r"^(?:/v\d+(?:alpha|beta)?\d*)+(?=/|$)")
"""Repeated if a base URL has a version and an SDK adds its own."""
SLASHES = re.compile("//+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, as far as the request tells."""

    token: str | None
    """None: the request has no token."""
    session: str | None = None
    """The client's own name for this conversation; None: not given."""
    agent: str = ""
    """The agent's name; "": not given."""
    retries: int = 0
    """How often the SDK has sent this request before."""
    request_id: str = ""
    """The name of this request; "": not given. See `REQUEST`."""
    peer: str = ""
    """The IP address of the client; "": unknown."""
    host: str = ""
    """The `Host` header; "": not sent."""
    origin: str | None = None
    """The web page that sent the request; None: no browser sent it."""


def caller_of(scope: Mapping[str, Any], *, path_token: str | None) -> Caller:
    """The caller of an ASGI request."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in READ:
            text = value.decode("latin-1")
            if name == b"baggage" and name in found:  # one list in several headers
                text = f"{found[name]},{text}"
            found[name] = text
    baggage = _members(found.get(b"baggage", ""))
    retries = found.get(b"x-stainless-retry-count", "0")
    request_id = found.get(REQUEST, "")
    return Caller(
        token=baggage.get(BAGGAGE_KEY) or path_token or _key(found, scope["query_string"].decode("latin-1")),
        session=next((found[name] for name in SESSIONS if found.get(name)), None),
        agent=baggage.get(AGENT) or found.get(b"x-agent-name", ""),
        retries=int(retries) if retries.isascii() and retries.isdigit() and len(retries) < 9 else 0,
        request_id=request_id if len(request_id) <= LONGEST_NAME else "",
        peer=(scope.get("client") or ("",))[0],
        host=found.get(b"host", ""),
        origin=found.get(b"origin"),
    )


def is_local(caller: Caller) -> bool:
    """Did a program of this machine send the request, and no web page?

    A page of any web site can send requests from here, too. Its browser then names a foreign origin; or a foreign host,
    if the site's domain name was made to resolve to this machine (DNS rebinding).
    """
    urls = [f"//{caller.host}"] if caller.origin is None else [f"//{caller.host}", caller.origin]
    return is_loopback(caller.peer) and all(is_loopback(_hostname(url)) for url in urls)


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Do only programs of the same machine reach this name or address?"""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def split_path(path: str) -> tuple[str | None, str]:
    """`/r/<token>/v1/chat/completions` → (token, `/chat/completions`).

    `/r/<token>` and `/v1` may be missing, and slashes may be doubled.
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
