"""Another server that answers in place of a policy: it gets the request as it is, in its own dialect."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from lightningrl.dialects.base import Refused
from lightningrl.engine.http import watched
from lightningrl.errors import UserError
from lightningrl.gateway.http import Incoming, Send
from lightningrl.gateway.identity import KEYS, REQUEST
from lightningrl.gateway.refusals import GONE

RECORDED = 16 * 1024 * 1024
"""Bytes of a streamed answer that are recorded."""
SHOWN = 500
"""Bytes that are shown of an error that is not JSON."""
CONNECT_S = 10.0
HOP_BY_HOP = b"""
    host connection keep-alive proxy-connection proxy-authorization te trailer upgrade http2-settings
    content-length transfer-encoding content-encoding accept-encoding expect
""".split()
DROPPED = frozenset((*HOP_BY_HOP, *KEYS, b"baggage", b"x-agent-name", REQUEST))
"""Request headers that are not forwarded: those of this connection, and those that may hold an attempt's token."""
KEPT = frozenset(
    ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id", "cache-control")
)
"""Response headers that are forwarded."""


@dataclass(slots=True, kw_only=True)
class Relayed:
    """The answer of an upstream, as far as it has come."""

    started_at: float = field(default_factory=time.time)
    status: int = 0
    """0: no response yet."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    """Of a stream: the first `RECORDED` bytes."""
    streamed: bool = False
    """It is a stream: the first client has received all but the end of it."""
    broken: str | None = GONE
    """Why the answer is incomplete. It counts as incomplete until its end has been seen."""

    async def give(self, send: Send) -> None:
        """Send all of it to a client that has received nothing yet."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": bytes(self.body)})


class Upstream:
    """Another server, and the connections to it."""

    def __init__(self, name: str, *, url: str, key_env: str = "", model: str = "") -> None:
        if key_env and key_env not in os.environ:
            message = f"`upstreams.{name}` wants its key in `{key_env}`, which is not set"
            raise UserError(message, hint=f"export {key_env}=…")
        self.name = name
        self._url = url.rstrip("/")
        self._key = os.environ.get(key_env, "")
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def relay(self, relayed: Relayed, incoming: Incoming, *, body: bytes, model: str) -> None:
        """Forward a request, and fill `relayed` with the answer. Pieces of a stream are sent on as they come.

        `model` is the model name in the request. Raises `Refused` if the upstream does not answer.
        """
        path, query = incoming.path, incoming.query
        if self._model:
            path, body = path.replace(f"/{model}:", f"/{self._model}:"), _renamed(body, self._model)
        parameters = "&".join(part for part in query.split("&") if part and not part.startswith("key="))
        url = f"{self._url}{path}" + (f"?{parameters}" if parameters else "")
        headers = self._headers(incoming.scope["headers"], query)
        try:
            async with self._open().post(url, data=body, headers=headers, allow_redirects=False) as answer:
                if 300 <= answer.status < 400:
                    message = f"redirects to `{answer.headers.get('location')}`"
                    raise self._failed(relayed, message, hint="set that as its url")
                with watched(answer):
                    await _take(relayed, answer, incoming.send)
                if relayed.broken and not relayed.streamed and json_object(relayed.body) is None:
                    raise _no_json(relayed, answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = "broke off" if relayed.status else "does not answer"
            message = f"{what}: {type(error).__name__}: {error}"
            raise self._failed(relayed, message, hint="is its url right, and does it run?") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True)
        return self._session

    def _headers(self, headers: Sequence[tuple[bytes, bytes]], query: str) -> list[tuple[str, str]]:
        """The client's headers, with our key in the place of its token: servers of this dialect look for it there."""
        kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name not in DROPPED]
        if not self._key:
            return kept
        names = [name for name, _ in headers if name in KEYS]
        if not names:
            names = [b"x-goog-api-key" if "key=" in query else b"authorization"]
        keys = [(name.decode(), f"Bearer {self._key}" if name == b"authorization" else self._key) for name in names]
        return kept + keys

    def _failed(self, relayed: Relayed, what: str, *, hint: str) -> Refused:
        relayed.broken = f"the upstream `{self.name}` {what}"
        return Refused(502, relayed.broken, code="upstream_error", hint=hint)


def json_object(data: bytes | bytearray) -> dict[str, Any] | None:
    """None: the data is no JSON object."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def _take(relayed: Relayed, answer: aiohttp.ClientResponse, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in answer.headers.items()]
    relayed.status = answer.status
    relayed.headers = [(name.encode(), value.encode("latin-1")) for name, value in headers if name in KEPT]
    relayed.streamed = answer.content_type == "text/event-stream"
    if relayed.streamed:
        await send({"type": "http.response.start", "status": relayed.status, "headers": relayed.headers})
        async for piece in answer.content.iter_any():
            if len(relayed.body) < RECORDED:
                relayed.body += piece
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    else:
        relayed.body += await answer.read()
    relayed.broken = None if answer.status < 400 else f"the upstream answered with status {answer.status}"


def _no_json(relayed: Relayed, answer: aiohttp.ClientResponse) -> Refused:
    """For an error page, e.g. of a proxy."""
    page = relayed.body[:SHOWN].decode(errors="replace").strip()
    waits = answer.headers.get("retry-after", "")
    retry_after_s = float(waits) if waits.isdecimal() else None
    message = f"{relayed.broken}: {page or 'nothing'}"
    return Refused(answer.status, message, code="upstream_error", retry_after_s=retry_after_s)


def _renamed(body: bytes, model: str) -> bytes:
    tree = json_object(body)
    if tree is None or "model" not in tree:
        return body
    return msgspec.json.encode({**tree, "model": model})
