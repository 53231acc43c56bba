"""How does an answer get to the client? In one piece, or as a stream of events while it is being sampled."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from lightningrl.chat import Piece
from lightningrl.dialects.base import Dialect, Refused, Reply, TokenLogprob
from lightningrl.gateway.http import Send, respond

STREAMED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
ALIVE = b": keep-alive\n\n"
"""A comment: readers of server-sent events skip it."""
Show: TypeAlias = Callable[[int, Piece, Sequence[TokenLogprob] | None], Awaitable[None]]
"""Takes the index of an answer, new text of it, and the tokens of that text (None: not requested)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A complete answer, already recorded."""

    reply: Reply
    body: Mapping[str, Any] | None
    """The response as it was recorded; None if several calls make up the answer."""


class Delivery(Protocol):
    """Sends one answer to one client."""

    def begin(self) -> Show | None:
        """Called before sampling starts, for the client that is served live. None: send nothing before the end."""
        ...

    async def keep_alive(self) -> None:
        """Called every `KEEP_ALIVE_S` seconds while the answer is being made."""
        ...

    async def give(self, answered: Any) -> None:
        """Send the answer: `Answered`, or the `Relayed` answer of an upstream."""
        ...

    async def fail(self, refused: Refused) -> None:
        """End a stream that has begun with an error. Raises `refused` if nothing has been sent yet."""
        ...


def delivery_of(dialect: Dialect, begun: Reply, send: Send) -> Delivery:
    """`begun`: all of the answer that is known before anything is sampled."""
    return Streamed(dialect, begun, send) if begun.request.stream else Whole(dialect, send)


class Whole:
    """In one piece."""

    def __init__(self, dialect: Dialect, send: Send) -> None:
        self._dialect = dialect
        self._send = send

    def begin(self) -> Show | None:
        return None

    async def keep_alive(self) -> None:
        """HTTP allows nothing before the response."""

    async def give(self, answered: Answered) -> None:
        body = self._dialect.respond(answered.reply) if answered.body is None else answered.body
        await respond(self._send, 200, body)

    async def fail(self, refused: Refused) -> None:
        raise refused


class Streamed:
    """Event by event. The terminal event is sent after the call is recorded."""

    def __init__(self, dialect: Dialect, begun: Reply, send: Send) -> None:
        self._events = dialect.stream(begun)
        self._send = send
        self._live = False
        """False for a repeated request: it gets the whole stream at once."""
        self._began = False
        """The status line has been sent, with the first event. Until then the answer may still become an error."""
        self._quiet = True
        """Nothing has been sent since `keep_alive` was last called."""

    def begin(self) -> Show | None:
        self._live = True
        events = self._events

        async def show(choice: int, piece: Piece, tokens: Sequence[TokenLogprob] | None) -> None:
            data = events.reasoning(choice, piece.reasoning) if piece.reasoning else b""
            if piece.content or tokens:
                data += events.text(choice, piece.content, tokens)
            await self._write(data)

        return show

    async def keep_alive(self) -> None:
        if self._quiet and self._events.media_type == "text/event-stream":
            await self._write(ALIVE)
        self._quiet = True

    async def give(self, answered: Answered) -> None:
        reply, events = answered.reply, self._events
        data = b""
        for choice in () if self._live else reply.choices:
            message = choice.message
            data += events.reasoning(choice.index, message.reasoning) if message.reasoning else b""
            data += events.text(choice.index, message.content, choice.tokens) if message.content else b""
        for choice in reply.choices:
            data += events.finish(choice)
        await self._write(data + events.close(reply), more=False)

    async def fail(self, refused: Refused) -> None:
        if not self._began:
            raise refused
        await self._write(self._events.error(refused), more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self._quiet = False
        if not self._began:
            self._began = True
            headers = [(b"content-type", self._events.media_type.encode()), *STREAMED]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
