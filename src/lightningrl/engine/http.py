"""HTTP to the servers of one engine: choose a server, send a request, read the response, attribute errors.

Connections are not capped: servers queue better than clients do. A request that is cancelled closes its connection,
which tells the server to cancel the generation.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lightningrl.engine.base import EngineBusy, Unanswerable
from lightningrl.errors import EngineError, UserError

T = TypeVar("T")
CONNECT_S = 10.0
IDLE_S = 900.0
"""Seconds without a byte after which a request fails. Without streaming, a long completion is sampled in silence."""
KEEP_ALIVE_S = 4.0
"""An unused connection is closed after this many seconds. uvicorn closes them after 5 s, which could meet a request."""
REST_S, LONGEST_REST_S, REST_SHARE = 0.02, 0.1, 1 / 20
"""After each batch, a stream rests for a share of its age, within these bounds (seconds). So one wake-up serves 4 to 20
tokens at 200 tokens per second, and the end is seen late by at most a 20th (streams of 0.4 s and more). Reading all the
time costs twice the CPU.
"""
RETRY_AFTER_S = 1.0
"""Seconds to wait if a busy server sends no `Retry-After`."""
BODY_LIMIT = 2**28
"""Bytes of a response that is not streamed. 32,768 tokens with 20 alternatives each are about 40 MB."""
FULL = 2.0
"""A server that has this many times its share of the generations is passed over (bounded loads, arXiv 1608.01350)."""
TIMED_OUT = 408
"""Besides 429, the only 4xx status that does not blame the request."""
COMPLETIONS = "/v1/completions"
BROKEN = "the server's own log says why"


@dataclass(slots=True, eq=False, kw_only=True)
class Server:
    """One server of a pool."""

    url: str
    """Without `/v1` and without a slash at the end."""
    salt: bytes
    """Key of its hash in `Pool.choose`."""
    in_flight: int = 0
    """Number of generations under way."""


@dataclass(slots=True)
class _Sent:
    """One sending of a request."""

    reused: bool = False
    """Over a connection that has served another request."""


async def _reused(_: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.reused = True


class Problem(msgspec.Struct):
    message: str = ""


class _Failure(msgspec.Struct):
    """The body of an error: vLLM and OpenAI use `error`, FastAPI uses `detail`."""

    error: Problem | str | None = None
    detail: str | None = None
    message: str | None = None


_failure = msgspec.json.Decoder(_Failure)


class Pool:
    """The servers at `urls`. Belongs to the event loop of its first request."""

    def __init__(self, urls: Sequence[str], *, engine: str) -> None:
        if not urls:
            raise UserError(
                f"engine `{engine}` has no servers", hint='name them: `engine.urls=["http://127.0.0.1:8000"]`'
            )
        self.servers = [_server(url) for url in urls]
        self._session: aiohttp.ClientSession | None = None
        self._responses: set[aiohttp.ClientResponse] = set()
        """Responses under way. Closing a session does not wake up their readers."""
        self._closed = False

    def choose(self, key: bytes) -> Server:
        """The server for a key, always the same one unless it is overloaded. Rendezvous hashing: adding or removing a
        server moves few keys.
        """
        ranked = sorted(self.servers, key=lambda s: blake2b(key, key=s.salt, digest_size=8).digest())
        limit = 1 + FULL * sum(s.in_flight for s in self.servers) / len(self.servers)
        return next(s for s in ranked if s.in_flight < limit)

    async def complete(self, server: Server, body: bytes, *, hint: str | None = None) -> bytes:
        """The response to a completion request. `hint`: what may be wrong if the server refuses."""
        async with self._request(server, "POST", COMPLETIONS, body) as response:
            return _accepted(server, response, await _read(server, response), hint=hint)

    async def stream(self, server: Server, body: bytes, *, hint: str | None = None) -> AsyncGenerator[bytes, None]:
        """The pieces of a streamed response. Close the generator to cancel the request."""
        async with self._request(server, "POST", COMPLETIONS, body) as response:
            if response.status != 200:
                _accepted(server, response, await _read(server, response), hint=hint)
            began = asyncio.get_running_loop().time()
            while data := await response.content.readany():
                yield data
                await _rest(response, began=began)
                self._refuse_if_closed()

    async def post(
        self, server: Server, path: str, payload: object = None, *, hint: str | None = None, absent: bytes | None = None
    ) -> bytes:
        """`absent` stands for a 404; None: a 404 is an error."""
        body = b"" if payload is None else msgspec.json.encode(payload)
        async with self._request(server, "POST", path, body) as response:
            if response.status == 404 and absent is not None:
                return absent
            return _accepted(server, response, await _read(server, response), hint=hint)

    async def get(self, server: Server, path: str, *, hint: str | None = None, absent: bytes | None = None) -> bytes:
        """`absent` stands for a 404; None: a 404 is an error."""
        async with self._request(server, "GET", path) as response:
            if response.status == 404 and absent is not None:
                return absent
            return _accepted(server, response, await _read(server, response), hint=hint)

    async def close(self) -> None:
        """Requests under way fail with an `EngineError`."""
        self._closed = True
        for response in self._responses:
            response.close()
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _request(
        self, server: Server, method: str, path: str, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, once its headers have come. Leaving the block before the body's end closes the connection."""
        try:
            async with await self._send(server, method, path, body) as response:
                self._responses.add(response)
                try:
                    with watched(response):
                        yield response
                finally:
                    self._responses.discard(response)
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(server, error) from error

    async def _send(self, server: Server, method: str, path: str, body: bytes | None) -> aiohttp.ClientResponse:
        """The response, once its headers have come. A request is repeated only if it met the end of a kept connection:
        sent over a reused connection, and nothing came back. Not all requests are idempotent, e.g. loading an adapter.
        """
        while True:
            self._refuse_if_closed()
            sent = _Sent()
            try:
                async with asyncio.timeout(CONNECT_S + IDLE_S):  # aiohttp waits forever for a server that does not read
                    return await self._open().request(
                        method, server.url + path, data=body, allow_redirects=False, trace_request_ctx=sent
                    )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                unanswered = isinstance(error, OSError) or isinstance(error.message, str)  # else it holds the headers
                if not (sent.reused and unanswered):
                    raise

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_connection_reuseconn.append(_reused)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json"},
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                trace_configs=[trace],
            )
        return self._session

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _failure(self, server: Server, error: Exception) -> EngineError:
        if self._closed:
            return EngineError("the engine was closed")
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return EngineError(
                f"cannot reach `{server.url}`: {error}", hint="is the server running? check `engine.urls`"
            )
        what = str(error) or "the request could not be sent in time"
        return EngineError(f"`{server.url}` broke off: {type(error).__name__}: {what}", hint=BROKEN)


@contextmanager
def watched(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Fail the reader of the body if the connection closes first. aiohttp 3.14 closes it without that if the body is
    malformed.
    """
    protocol = response.connection.protocol if response.connection is not None else None
    if protocol is None:  # all of it has come
        yield
        return
    content, closed = response.content, protocol.closed

    def fail(_: object = None) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was closed before the body's end"))

    if closed is None:
        fail()
        yield
        return
    closed.remove_done_callback(_retrieve)  # the connection may have served other requests
    closed.add_done_callback(_retrieve)
    closed.add_done_callback(fail)
    try:
        yield
    finally:
        closed.remove_done_callback(fail)


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Without this, asyncio logs the exception of a connection that the server resets."""
    if not closed.cancelled():
        closed.exception()


async def _rest(response: aiohttp.ClientResponse, *, began: float) -> None:
    """Leave a stream that began at `began` (loop time) unread for a share of its age. Streams wake up together."""
    transport = response.connection.transport if response.connection is not None else None
    if transport is None:  # all of it has come
        return
    transport.pause_reading()
    now = asyncio.get_running_loop().time()
    wakes = now + min(max(REST_S, (now - began) * REST_SHARE), LONGEST_REST_S)
    await asyncio.sleep(math.ceil(wakes / REST_S) * REST_S - now)
    if not transport.is_closing():
        transport.resume_reading()


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Payloads of the complete server-sent events in `data`, without comments and `[DONE]`; and the remaining bytes."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    *whole, rest = data.split(b"\n\n")
    return [event[6:] for event in whole if event.startswith(b"data: ") and event != b"data: [DONE]"], rest


def decoded(server: Server, body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The value in a response. Raises `EngineError` if it is no JSON, or of another type."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(
            f"the response of `{server.url}` cannot be read: {error}",
            hint="is it the kind of server that `engine.name` says?",
        ) from error


async def _read(server: Server, response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises `EngineError` if it is longer than `BODY_LIMIT`."""
    pieces, length = [], 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        length += len(piece)
        if length > BODY_LIMIT:
            raise EngineError(f"`{server.url}` sent a response of more than `{BODY_LIMIT}` bytes", hint=BROKEN)
    return b"".join(pieces)


def _accepted(server: Server, response: aiohttp.ClientResponse, body: bytes, *, hint: str | None) -> bytes:
    """The body of a response with status 200. Raises the `EngineError` that any other status stands for."""
    status = response.status
    if status == 200:
        return body
    message = f"`{server.url}` answered {status}: {_message(body)}"
    if status in (429, 503):
        raise EngineBusy(message, retry_after_s=_seconds(response.headers.get("Retry-After")))
    if location := response.headers.get("Location"):
        hint = f"it redirects to `{location}`: put the final address into `engine.urls`"
    blames_request = 400 <= status < 500 and status != TIMED_OUT
    raise (Unanswerable if blames_request else EngineError)(message, hint=hint)


def _message(body: bytes) -> str:
    try:
        failure = _failure.decode(body)
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace").strip() or "nothing"
    error = failure.error.message if isinstance(failure.error, Problem) else failure.error
    return error or failure.detail or failure.message or body[:500].decode(errors="replace")


def _seconds(retry_after: str | None) -> float:
    """The value of a `Retry-After` header; `RETRY_AFTER_S` if it is absent, or a date."""
    try:
        seconds = float(retry_after or RETRY_AFTER_S)
    except ValueError:
        return RETRY_AFTER_S
    return seconds if math.isfinite(seconds) and seconds >= 0 else RETRY_AFTER_S


def _server(url: str) -> Server:
    base = url.rstrip("/").removesuffix("/v1")
    if not _is_address(base):
        raise UserError(
            f"`{url}` in `engine.urls` is not the address of a server", hint="write it as `http://host:port`"
        )
    return Server(url=base, salt=blake2b(base.encode(), digest_size=16).digest())


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises unless it is a number below 65,536
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
