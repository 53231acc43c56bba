"""ASGI, as far as the gateway needs it: read a request, notice that its client goes away, send a response."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from lightningrl.dialects.base import Refused
from lightningrl.gateway.body import too_large, unpacked
from lightningrl.gateway.identity import Caller, caller_of, split_path
from lightningrl.gateway.threads import in_thread

T = TypeVar("T")
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_LIMIT = 64 * 1024 * 1024
"""Bytes of one request; a conversation of a million tokens has about 4 MB."""
HEADER_LIMIT = 64 * 1024
"""Bytes of all headers of a request; those of a coding agent have about 2 KB."""
JSON = (b"content-type", b"application/json")
ABORT = "lightningrl.abort"
"""Extension of a scope: a function that closes the connection at once. See `Connection`."""


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

    async def break_off(self) -> None:
        """Close the connection without the rest of a response."""
        self.scope["extensions"][ABORT]()
        await disconnected(self.receive)

    async def read(self, *, limit: int | None = None) -> bytes:
        """The body, unpacked, of at most `limit` bytes (None: `BODY_LIMIT`). Raises `Refused`, and `Gone`."""
        limit = BODY_LIMIT if limit is None else limit
        headers = self.scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > HEADER_LIMIT:
            raise Refused(431, f"the headers have more than `{HEADER_LIMIT}` bytes", code="too_large")
        body = await self._collect(limit)
        encoding = next((value for name, value in headers if name == b"content-encoding"), b"identity").strip().lower()
        if encoding == b"identity":
            return body
        return await in_thread(unpacked, body, encoding.decode("latin-1"), limit=limit)

    async def _collect(self, limit: int) -> bytes:
        body, size, more = b"", 0, True
        pieces: list[bytes] = []
        while more:
            event = await self.receive()
            if event["type"] == "http.disconnect":
                raise Gone
            body, more = event.get("body", b""), event.get("more_body", False)
            size += len(body)
            if size > limit:
                raise too_large(limit)
            pieces.append(body)
        return body if len(pieces) == 1 else b"".join(pieces)  # nearly all bodies come in one piece


def incoming(scope: Scope, receive: Receive, send: Send) -> Incoming:
    path_token, path = split_path(scope["path"])
    query = scope["query_string"].decode("latin-1")
    return Incoming(scope=scope, receive=receive, send=send, path=path, path_token=path_token, query=query)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it if the client goes away first. Raises `Gone` then."""
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


async def respond(
    send: Send,
    status: int,
    body: Mapping[str, Any] | msgspec.Struct,
    *,
    retry_after_s: float | None = None,
    final: bool = False,
) -> None:
    """Send JSON. `final`: tell SDKs not to repeat the request."""
    data = msgspec.json.encode(body)
    headers = [JSON, (b"content-length", str(len(data)).encode())]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    if final:
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def other(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer everything except HTTP requests: start and end of an ASGI server, and WebSockets, which are refused."""
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
