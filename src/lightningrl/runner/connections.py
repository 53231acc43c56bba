"""HTTP/1.1 as bytes, for the relay: the requests on an agent's connection, and the server's answers to them.

A request is kept whole, so that it can be sent again. An answer is passed on as it comes: a parser only watches for its
end, so an event of a stream costs little more than reading and writing its bytes.
"""

import asyncio
import logging
import re
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, cast

import httptools
import msgspec

log = logging.getLogger(__name__)

BODY_LIMIT = 64 * 1024 * 1024
"""Bytes of a request's body, as in the gateway."""
HEADER_LIMIT = 64 * 1024
"""Bytes of a request's headers, as in the gateway."""
HELD_LIMIT = 16 * 1024 * 1024
"""A shorter answer of known length is passed on when it is complete: if it breaks, its request is sent again."""
PIPELINE = 16
"""Requests that may wait on one connection for the answer to an earlier one."""
AWAY = (502, 503, 504)
"""With such a status, a proxy may be saying that it does not reach the server."""
KEEPALIVE_S = 30
"""Idle time after which the system asks whether the server is still there: a network may forget idle connections."""
PROBE_S, PROBES = 10, 3
"""Time between two such questions, and how many may stay without an answer."""
REASONS = {400: "Bad Request", 403: "Forbidden", 413: "Content Too Large", 431: "Headers Too Large", 502: "Bad Gateway"}
HOP_BY_HOP = frozenset(
    b"""
    host connection keep-alive proxy-connection proxy-authorization te trailer upgrade http2-settings
    content-length transfer-encoding expect x-lightningrl-request
    """.split()
)
"""Request headers that are not passed on: those of this connection, and those that the relay writes itself."""
OFFER = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c)", re.IGNORECASE)
"""Java's client offers HTTP/2 in its first request. The parser would then lose the body, so the offer is hidden."""


class Broken(Exception):
    """The connection to the server broke before the end of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, as an agent has sent it."""

    method: bytes
    target: bytes
    """Path and query, encoded as they came."""
    version: bytes
    """`1.1` or `1.0`."""
    headers: list[tuple[bytes, bytes]]
    body: bytes
    keep_alive: bool
    """The agent wants to send more requests on this connection."""
    upgrade: bool
    """The agent asks for another protocol, e.g. a WebSocket."""

    def encoded(self, *, base: bytes, host: bytes, request_id: bytes) -> bytes:
        """The bytes to send to the server, below the path `base`. `request_id`: empty for a request without one."""
        lines = [b"%b %b%b HTTP/%b\r\nhost: %b" % (self.method, base, self.target, self.version, host)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0].lower() not in HOP_BY_HOP]
        if self.upgrade:
            lines += [b"connection: upgrade"] + [b"%b: %b" % p for p in self.headers if p[0].lower() == b"upgrade"]
        if self.body or self.method not in (b"GET", b"HEAD"):
            lines.append(b"content-length: %d" % len(self.body))
        if request_id:
            lines.append(b"x-lightningrl-request: %b" % request_id)
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


class Client(Protocol):
    """What an answer is passed on to."""

    source: "ServerConnection | None"
    """Where the answer comes from; it is paused while the client reads too slowly."""

    def write(self, data: bytes) -> None: ...


class Nobody:
    """For an answer that is not wanted."""

    source: "ServerConnection | None" = None

    def write(self, data: bytes) -> None:
        pass


class AgentConnection(asyncio.Protocol):
    """A connection from an agent. Its requests are answered one after the other, by `serve`.

    `serve(request, connection)` runs as a task, and is cancelled when the agent closes the connection. It returns
    whether more requests can be answered.
    """

    def __init__(
        self,
        serve: "Callable[[Request, AgentConnection], Coroutine[Any, Any, bool]]",
        *,
        admit: "Callable[[AgentConnection], bool]",
        ended: "Callable[[AgentConnection], None]",
    ) -> None:
        """`admit` is called when it begins; if it returns False, the connection is closed. `ended`: when it ends."""
        self.source: ServerConnection | None = None
        self._serve = serve
        self._admit = admit
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._waiting: deque[Request | int] = deque()
        """Requests that have arrived; a number is the status of a refusal."""
        self._task: asyncio.Task[bool] | None = None
        self._unread = 0
        """Bytes of headers and chunk sizes since the last piece of a body or the end of a request."""
        self._begin()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after what has been written."""
        if self._transport is not None:
            self._transport.close()

    def refuse(self, status: int, message: str, *, code: str) -> None:
        """Answer with an error in OpenAI's shape, and close."""
        body = msgspec.json.encode({"error": {"message": message, "type": code, "param": None, "code": code}})
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._admit(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None
        self._waiting.clear()
        self._ended(self)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        if self.source is not None:
            self.source.pause()

    def resume_writing(self) -> None:
        if self.source is not None:
            self.source.resume()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        self._unread += len(data)
        if b"h2c" in data and data.startswith(b"POST "):
            head, end, body = data.partition(b"\r\n\r\n")
            data = OFFER.sub(b"\r\nx-offered:", head) + end + body
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._parser = None  # the server refuses it, and then the connection ends
        except httptools.HttpParserError as error:
            self.refuse(400, f"this is not HTTP: {error}", code="invalid_request")
        if self._unread > HEADER_LIMIT:
            self.refuse(431, f"the headers have more than `{HEADER_LIMIT}` bytes", code="too_large")

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if any(name.lower() == b"expect" for name, _ in self._headers):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._size += len(body)
        if self._size <= BODY_LIMIT:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        assert parser is not None, "it is calling"
        self._unread = 0
        request = Request(
            method=parser.get_method(),
            target=self._target,
            version=parser.get_http_version().encode(),
            headers=self._headers,
            body=self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces),
            keep_alive=parser.should_keep_alive(),
            upgrade=parser.should_upgrade(),
        )
        self._waiting.append(413 if self._size > BODY_LIMIT else request)
        self._begin()
        if len(self._waiting) > PIPELINE:
            self.close()
        elif self._task is None:
            self._next()

    def _begin(self) -> None:
        self._target, self._size = b"", 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []

    def _next(self) -> None:
        request = self._waiting.popleft()
        if isinstance(request, int):
            self.refuse(request, f"the body has more than `{BODY_LIMIT}` bytes", code="too_large")
            return
        self._task = asyncio.get_running_loop().create_task(self._serve(request, self))
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[bool]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the relay failed", exc_info=error)
        if task.cancelled() or error is not None or not task.result():
            self.close()
        elif self._waiting:
            self._next()


class ServerConnection(asyncio.Protocol):
    """A connection to the server, for one request at a time."""

    def __init__(self, *, ended: "Callable[[ServerConnection], None]") -> None:
        self.reusable = False
        """The server keeps it open for another request."""
        self.idle_since = 0.0
        """Of `time.monotonic`: end of its latest answer."""
        self.passed = False
        """Some of the answer has been passed on."""
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._lost = self._paused = False
        self._client: Client | None = None
        self._done: asyncio.Future[None] | None = None

    async def ask(self, data: bytes, client: Client, *, bodiless: bool) -> bool:
        """Send a request and pass the answer on. Returns whether its connection may stay open. Raises `Broken`.

        `bodiless`: the answer has no body, whatever its headers say, as the request's method is `HEAD`.
        """
        if self._lost or self._transport is None:
            raise Broken("it was closed")
        self.reusable = False
        self._client, client.source = client, self
        self._parser = httptools.HttpResponseParser(self)
        self._bodiless = bodiless
        self._held = bytearray()
        self._hold, self._complete, self._keep_alive, self.passed = True, False, False, False
        self._length: int | None = None
        self._until_close = True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await self._done
        finally:
            client.source = self._client = self._done = None
            self.resume()
        return self._keep_alive

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost, self.reusable = True, False
        self._ended(self)
        if self._done is None or self._done.done():
            return
        if self._until_close and not self._hold and exc is None:  # the length of the answer was not known
            self._done.set_result(None)
        else:
            self._done.set_exception(Broken(f"{type(exc).__name__}: {exc}" if exc else "the server closed it"))

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.abort()  # no request is under way
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._done.set_exception(Broken(f"it sent no HTTP: {error}"))
            self.abort()
            return
        if self._hold or self._held:
            self._held += data
            data = b""
        if self._complete:
            self._end(data)
        elif not self._hold:
            self._pass_on(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-length":
            self._length, self._until_close = int(value), False
        elif lower == b"transfer-encoding":
            self._until_close = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status < 200:
            return
        self._hold = self._status in AWAY or (self._length is not None and self._length <= HELD_LIMIT)
        self._body = bytearray()
        self._complete, self._keep_alive = self._bodiless, self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._status in AWAY and len(self._body) < HELD_LIMIT:
            self._body += body

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._complete, self._keep_alive = True, self._parser.should_keep_alive()

    def _pass_on(self, data: bytes) -> None:
        assert self._client is not None, "it is asking"
        if self._held:
            data = bytes(self._held) + data
            self._held.clear()
        if data:
            self.passed = True
            self._client.write(data)

    def _end(self, rest: bytes) -> None:
        assert self._done is not None, "it is asking"
        if self._status in AWAY and not _is_of_the_server(bytes(self._body)):
            self._done.set_exception(Broken(f"a proxy answered with status {self._status}"))
            self.abort()
            return
        self._pass_on(rest)
        self.reusable = self._keep_alive and not self._bodiless
        self.idle_since = monotonic()
        self._done.set_result(None)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


def _is_of_the_server(body: bytes) -> bool:
    """Whether an error comes from LightningRL's server, and not from a proxy before it, or from a server that ends."""
    try:
        error = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(error, dict) and "error" in error and b"the run has ended" not in body
