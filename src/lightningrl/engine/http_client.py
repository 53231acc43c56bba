"""How does a request reach a server, and its answer come back? HTTP/1.1 for one purpose: JSON for a few known servers,
at hardly any cost.

A call is one write, one future and no timer. A `Client` keeps the connections to one server, as many as are needed. A
`Connection` reads one answer at a time: whole, or as a stream that can be left at any moment, which closes it. Whatever
goes wrong is an `EngineError` that names the server.
"""

import asyncio
import base64
import ssl
from typing import NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from lightningrl.errors import EngineError

CONNECT_S = 10.0
IDLE_S = 900.0
"""Seconds without a byte after which a server is given up; without streaming, a whole long answer is sampled in
silence.
"""
KEEP_ALIVE_S = 4.0
"""Unused connections are dropped before the server does it: uvicorn closes them after 5 s, and a request could meet
that.
"""
TICKS = 4
"""Looks at all connections per `KEEP_ALIVE_S`. They keep `IDLE_S`, too, so that no call needs a timer."""
REST_S, LONGEST_REST_S, REST_SHARE = 0.02, 0.1, 1 / 20
"""After each batch a stream is not read for a share of the time it has taken so far, within these bounds: then what a
batch costs is paid once for 4 to 20 tokens at 200 tokens a second, which still looks alive, and the end is seen late by
a 20th at most (of streams of 0.4 s and more). One timer does it for all streams of a server: what is read together is
answered together. Half the CPU of reading all the time (benchmarks/gateway.py).
"""
ANSWER_LIMIT = 2**28
"""Bytes of an answer: 32,768 tokens with 20 alternatives each are about 40 MB."""
BROKEN = "the server's own log says why"


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    """Names as the server writes them; see `header`."""
    body: bytes

    def header(self, name: str) -> str | None:
        return _header(self.headers, name.encode())


class Client:
    """The connections to the server at `url`. Belongs to the event loop that makes the first request."""

    def __init__(
        self, url: str, *, connect_s: float = CONNECT_S, idle_s: float = IDLE_S, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        """Raises `ValueError` if `url` is no address."""
        self.url = url
        self._host, self._port, self._secure, self._path, self._head = _address(url)
        self._connect_s, self._idle_s, self._keep_alive_s = connect_s, idle_s, keep_alive_s
        self._kept: dict[Connection, None] = {}
        """Those that nobody uses; the last is the one that was used last."""
        self._all: set[Connection] = set()
        self._resting: list[Connection] = []
        """Streams that are not read for a while."""
        self._looking: asyncio.TimerHandle | None = None
        self._waking: asyncio.TimerHandle | None = None
        self._ssl: ssl.SSLContext | None = None
        self._closed = False

    async def ask(self, method: str, path: str, body: bytes) -> Answer:
        """The whole answer. Cancelled, it closes the connection."""
        connection = await self._send(method, path, body, stream=False)
        return connection.take()

    async def stream(self, path: str, body: bytes) -> "Connection":
        """The answer as far as it has come; the whole of it unless its status is 200. `close` it in any case."""
        return await self._send("POST", path, body, stream=True)

    async def close(self) -> None:
        """Whoever still waits or reads hears of it by an `EngineError`."""
        self._closed = True
        for timer in (self._looking, self._waking):
            if timer is not None:
                timer.cancel()
        for connection in list(self._all):
            connection.fail(EngineError("the engine was closed"))
        await asyncio.sleep(0)  # transports close one turn of the loop later

    def keep(self, connection: "Connection") -> None:
        self._kept[connection] = None

    def forget(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self._kept.pop(connection, None)

    def rest(self, connection: "Connection") -> None:
        """Call its `resume` until it has rested enough."""
        self._resting.append(connection)
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(REST_S, self._wake)

    def _wake(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._resting = [connection for connection in self._resting if not connection.resume(now)]
        self._waking = loop.call_later(REST_S, self._wake) if self._resting else None

    async def _send(self, method: str, path: str, body: bytes, *, stream: bool) -> "Connection":
        if self._closed:
            raise EngineError("the engine was closed")
        head = b"%b %b%b HTTP/1.1\r\n%b%d\r\n\r\n%b"
        request = head % (method.encode(), self._path, path.encode(), self._head, len(body), body)
        while self._kept:
            connection, _ = self._kept.popitem()
            if connection.open:
                if await connection.send(request, stream=stream):
                    return connection
                break  # the server had closed a connection that was kept: a new one tells whether it is there at all
        connection = await self._connect()
        if not await connection.send(request, stream=stream):
            raise EngineError(f"`{self.url}` broke off: it closed the connection without an answer", hint=BROKEN)
        return connection

    async def _connect(self) -> "Connection":
        if self._secure and self._ssl is None:
            self._ssl = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_s):
                name = self._host if self._ssl else None
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self._host, self._port, ssl=self._ssl, server_hostname=name
                )
        except OSError as error:
            why = (
                f"no connection within `{self._connect_s:g}` s"
                if isinstance(error, TimeoutError) and not error.errno
                else str(error)
            )
            raise EngineError(
                f"cannot reach `{self.url}`: {why}", hint="is the server running? check `engine.urls`"
            ) from error
        if self._closed:
            connection.drop()
            raise EngineError("the engine was closed")
        self._all.add(connection)
        if self._looking is None:
            self._looking = loop.call_later(self._keep_alive_s / TICKS, self._look)
        return connection

    def _look(self) -> None:
        """Close what nobody has used for long, and give up servers that have said nothing for very long."""
        tick_s = self._keep_alive_s / TICKS
        for connection in list(self._all):
            quiet_s = connection.tick() * tick_s
            if connection in self._kept:
                if quiet_s >= self._keep_alive_s:
                    connection.drop()
            elif quiet_s >= self._idle_s:
                connection.fail(
                    EngineError(f"`{self.url}` broke off: it said nothing for `{self._idle_s:g}` s", hint=BROKEN)
                )
        self._looking = asyncio.get_running_loop().call_later(tick_s, self._look) if self._all else None


class Connection(asyncio.Protocol):
    """One request after the other. Each answer is either taken at once by `take`, or read to its end or left by
    `close`.
    """

    def __init__(self, client: Client) -> None:
        self.status = 0
        self._client, self._loop = client, asyncio.get_running_loop()
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        """Of the body, not yet taken."""
        self._began = self._rests_until = 0.0
        """By the loop's clock."""
        self._waiter: asyncio.Future[None] | None = None
        self._failure: EngineError | None = None
        self._complete, self._reusable, self._stream, self._paused = True, True, False, False
        self._size = self._quiet = 0
        # what the parser calls: two of them straight into where the data goes, without a frame of Python
        self.on_header = self._headers.__setitem__
        self.on_body = self._pieces.append
        self._parser = HttpResponseParser(self)

    @property
    def open(self) -> bool:
        return not self._transport.is_closing()

    async def send(self, request: bytes, *, stream: bool) -> bool:
        """Ask, and wait for the answer or, if it is a stream, for the first of it. False: it was closed before anything
        came.
        """
        self.status, self._complete, self._stream = 0, False, stream
        self._size, self._quiet, self._failure = 0, 0, None
        self._headers.clear()
        self._pieces.clear()
        self._transport.write(request)
        await self._wait()
        self._began = self._loop.time()
        return self._complete or self.status != 0

    def take(self) -> Answer:
        """All that has come; the connection is free for the next request."""
        answer = Answer(self.status, self._headers.copy(), self._body())
        self.close()
        return answer

    async def read(self) -> bytes:
        """What has come since the last time; nothing: that was all."""
        if not self._pieces and not self._complete:
            await self._wait()
        body = self._body()
        self._size = 0
        if self._paused:
            now = self._loop.time()
            self._rests_until = now + min(LONGEST_REST_S, (now - self._began) * REST_SHARE)
            self._client.rest(self)
        return body

    def close(self) -> None:
        """Keep it for others, if the answer has come to its end; what still comes is unwanted otherwise."""
        self._quiet = 0
        if self._complete and self._reusable and self.open:
            self._client.keep(self)
        else:
            self.drop()

    def drop(self) -> None:
        self._complete = True
        self._transport.abort()

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._wake()
        self._transport.abort()

    def resume(self, now: float) -> bool:
        """Go on reading, if it has rested enough."""
        if now < self._rests_until:
            return False
        if self.open:
            self._paused = False
            self._transport.resume_reading()
        return True

    def tick(self) -> int:
        """How many times in a row this was called without anything having come."""
        self._quiet += self._complete or self._waiter is not None  # not while whoever reads takes their time
        return self._quiet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._quiet = 0
        if self._complete:  # nobody has asked for anything
            self._transport.abort()
            return
        self._size += len(data)
        self._parse(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.forget(self)
        if not self._complete and self._failure is None:
            if (
                self.status
                and exc is None
                and not (_header(self._headers, b"content-length") or _header(self._headers, b"transfer-encoding"))
            ):
                self._complete, self._reusable = True, False  # such a body ends with the connection
            elif self._size or self.status:
                why = (
                    "it closed the connection in the middle of an answer"
                    if exc is None
                    else f"{type(exc).__name__}: {exc}"
                )
                self._failure = EngineError(f"`{self._client.url}` broke off: {why}", hint=BROKEN)
            self._wake()
        del self._parser  # it holds methods of this connection: a circle

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("another answer to the same request")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and the like: the answer is yet to come
            self.status = 0
            self._headers.clear()
            return
        self._complete, self._reusable = True, self._parser.should_keep_alive()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._reusable = False
            if not self._complete:
                self.fail(
                    EngineError(f"`{self._client.url}` broke off: what it says is no HTTP/1.1: {error}", hint=BROKEN)
                )
        if self._complete:
            self._wake()
        elif self._stream and self._pieces and self.status == 200:
            self._paused = True
            self._transport.pause_reading()  # no server is read faster than its stream is taken
            self._wake()
        elif self._size > ANSWER_LIMIT:
            self.fail(EngineError(f"`{self._client.url}` answered more than `{ANSWER_LIMIT}` bytes"))

    async def _wait(self) -> None:
        """For a wake-up."""
        if self._failure is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._transport.abort()
                raise
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _body(self) -> bytes:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        return body


def _header(headers: dict[bytes, bytes], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers.items() if key.lower() == name.lower()), None)


def _address(url: str) -> tuple[str, int, bool, bytes, bytes]:
    """Host, port, whether TLS is wanted, the path before all paths, and the headers up to the length of the body."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"`{url}` is not the address of a server")
    host = parts.hostname if ":" in parts.hostname else parts.hostname.encode("idna").decode()
    secure = parts.scheme == "https"
    shown = f"[{host}]" if ":" in host else host
    lines = [f"Host: {shown}:{parts.port}" if parts.port else f"Host: {shown}", "Content-Type: application/json"]
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines.append(f"Authorization: Basic {base64.b64encode(user.encode()).decode()}")
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
    return (
        host,
        parts.port or (443 if secure else 80),
        secure,
        path.encode(),
        "\r\n".join([*lines, "Content-Length: "]).encode(),
    )
