"""ASGI, as far as the gateway needs it: read a request within its limits, and send an answer, whole or as a stream of
events.
"""

import asyncio
import hashlib
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from lightningrl.dialects.base import MediaType, Refused
from lightningrl.gateway.identity import Caller, caller_of, split_path
from lightningrl.gateway.threads import in_thread

T = TypeVar("T")
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_LIMIT = 64 * 1024 * 1024
"""Bytes of one request; a conversation of a million tokens has about 4 MB."""
HEADER_LIMIT = 64 * 1024
"""Bytes of all its headers; those of a coding agent have about 2 KB."""
LARGE = 1024 * 1024
"""Bytes of a body that is read off the event loop."""
TEXTS_LIMIT, VALUES_LIMIT = 400_000, 2_000_000
"""In the JSON of a large body. Making them takes up to 1.6 µs a text and 0.15 µs a value, and nothing else runs
meanwhile.
"""
NESTING_LIMIT = 100
"""Objects and lists within each other; what templates, stores and schemas make of more is anybody's guess."""

JSON = (b"content-type", b"application/json")
STREAMED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
ALIVE = b": keep-alive\n\n"
"""A comment, which every reader of server-sent events skips."""


class Gone(Exception):
    """The client went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One HTTP request. Its body has not been read yet."""

    scope: Scope
    receive: Receive
    send: Send
    path: str
    """Without `/r/<token>` and `/v1`."""
    path_token: str | None
    query: str

    @property
    def method(self) -> str:
        return self.scope["method"]

    def caller(self) -> Caller:
        return caller_of(self.scope, path_token=self.path_token)

    async def read(self, *, limit: int | None = None) -> bytes:
        """The body, unpacked, of at most `limit` bytes (None: `BODY_LIMIT`). Raises `Refused`, and `Gone`."""
        return await read(self.scope, self.receive, limit=limit)


def incoming(scope: Scope, receive: Receive, send: Send) -> Incoming:
    path_token, path = split_path(scope["path"])
    query = scope["query_string"].decode("latin-1")
    return Incoming(scope=scope, receive=receive, send=send, path=path, path_token=path_token, query=query)


async def read(scope: Scope, receive: Receive, *, limit: int | None = None) -> bytes:
    """The body, unpacked, of `limit` bytes at most (None: `BODY_LIMIT`). Raises `Refused` beyond the limits."""
    limit = BODY_LIMIT if limit is None else limit
    if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_LIMIT:
        raise Refused(431, f"the headers have more than `{HEADER_LIMIT}` bytes", code="too_large")
    body = await _collect(receive, limit)
    packed = (
        next((value for name, value in scope["headers"] if name == b"content-encoding"), b"identity").strip().lower()
    )
    return body if packed == b"identity" else await in_thread(_unpacked, body, packed.decode("latin-1"), limit)


async def _collect(receive: Receive, limit: int) -> bytes:
    event = await receive()
    if (
        not event.get("more_body", False)
        and event["type"] != "http.disconnect"
        and len(event.get("body", b"")) <= limit
    ):
        return event.get("body", b"")  # nearly all of them come in one piece
    pieces: list[bytes] = []
    size = 0
    while True:
        if event["type"] == "http.disconnect":
            raise Gone
        size += len(event.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        pieces.append(event.get("body", b""))
        if not event.get("more_body", False):
            return b"".join(pieces)
        event = await receive()


def _unpacked(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise Refused(
            415,
            f"the body's encoding `{encoding}` is not known here",
            code="unsupported_encoding",
            hint="send it plain, or as gzip",
        )
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either of them
    try:
        plain = unpacker.decompress(body, limit)
    except zlib.error as error:
        raise Refused(400, f"the body is not `{encoding}`: {error}", code="invalid_encoding") from error
    if unpacker.unconsumed_tail:
        raise _too_large(limit)
    if not unpacker.eof or unpacker.unused_data:
        what = "goes on behind its end" if unpacker.eof else "breaks off"
        raise Refused(
            400, f"the body's `{encoding}` {what}", code="invalid_encoding", hint="send it as one whole stream"
        )
    return plain


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do it, unless the client goes away first: then it is cancelled. Raises `Gone`."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task,))


async def understood(path: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a body, and a digest of both: equal for the same request once more. Raises `Refused`, as
    `decode` does.
    """
    return await in_thread(_understood, path, body) if len(body) > LARGE else _understood(path, body)


def _understood(path: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    return decode(body), hashlib.blake2b(path.encode("utf-8", "surrogatepass") + b"\n" + body, digest_size=16).digest()


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. NaN, lone surrogates and invalid UTF-8 are no JSON."""
    if len(body) > LARGE:
        _check_values(body)
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(raw, dict):
        raise Refused(400, "the body is not a JSON object", code="invalid_json")
    if body.count(b"{") + body.count(b"[") > NESTING_LIMIT and _deeper_than(raw, NESTING_LIMIT):
        raise _too_deep()
    return raw


def _check_values(body: bytes) -> None:
    """Count what JSON is made of before it is made: texts by their quotes, values by the commas between them."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    texts = plain.count(b'"') // 2
    values = 0 if texts > TEXTS_LIMIT else sum(part.count(b",") for part in plain.split(b'"')[::2])
    if texts > TEXTS_LIMIT or values > VALUES_LIMIT:
        message = f"the body has more than `{TEXTS_LIMIT}` texts or `{VALUES_LIMIT}` values"
        raise Refused(413, message, code="too_large", hint="shorten the conversation")


async def respond(
    send: Send, status: int, body: Mapping[str, Any], *, retry_after_s: float | None = None, final: bool = False
) -> None:
    data = msgspec.json.encode(body)
    headers = [JSON, (b"content-length", str(len(data)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    if final:
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


class EventSender:
    """Sends a stream of events. The status line goes out with the first of them: until then the answer may still become
    an error.
    """

    def __init__(self, send: Send, *, media_type: MediaType) -> None:
        self._send = send
        self._media_type: MediaType = media_type
        self.began = False
        self._quiet = True

    async def write(self, events: bytes) -> None:
        self._quiet = False
        if not self.began:
            self.began = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", self._media_type.encode()), *STREAMED],
                }
            )
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self) -> None:
        """Called at intervals. Sends a comment if nothing has been sent since the last call."""
        if self._quiet and self._media_type == "text/event-stream":
            await self.write(ALIVE)
        self._quiet = True

    async def end(self, events: bytes) -> None:
        """The last events. One message where they are all there is."""
        if not self.began:
            await self.write(b"")
        await self._send({"type": "http.response.body", "body": events})


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body has more than `{limit}` bytes", code="too_large", hint="shorten the conversation")


def _too_deep() -> Refused:
    return Refused(
        400, f"the body is nested deeper than `{NESTING_LIMIT}`", code="invalid_json", hint="send flatter JSON"
    )


async def other(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer what is not HTTP: the events of an ASGI server's life, and WebSockets, which are refused."""
    if scope["type"] == "lifespan":
        event = {"type": ""}
        while event["type"] != "lifespan.shutdown":
            event = await receive()
            await send({"type": f"{event['type']}.complete"})
    elif "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": 426, "headers": [JSON]})
        await send({"type": "websocket.http.response.body", "body": b"{}"})
    else:
        await send({"type": "websocket.close", "code": 1000})
