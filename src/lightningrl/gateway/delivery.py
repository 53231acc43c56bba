"""How does an answer get to the client? In one piece, or as a stream of events while it is being sampled."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from lightningrl.chat import Piece
from lightningrl.dialects.base import Dialect, Refused, Reply, TokenLogprob
from lightningrl.gateway.http import EventSender, Send, respond

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
        self._sender = EventSender(send, media_type=self._events.media_type)
        self._live = False
        """False for a repeated request: it gets the whole stream at once."""

    def begin(self) -> Show | None:
        self._live = True
        events, write = self._events, self._sender.write

        async def show(choice: int, piece: Piece, tokens: Sequence[TokenLogprob] | None) -> None:
            data = events.reasoning(choice, piece.reasoning) if piece.reasoning else b""
            if piece.content or tokens:
                data += events.text(choice, piece.content, tokens)
            await write(data)

        return show

    async def keep_alive(self) -> None:
        await self._sender.keep_alive()

    async def give(self, answered: Answered) -> None:
        reply, events = answered.reply, self._events
        data = b""
        for choice in () if self._live else reply.choices:
            message = choice.message
            data += events.reasoning(choice.index, message.reasoning) if message.reasoning else b""
            data += events.text(choice.index, message.content, choice.tokens) if message.content else b""
        for choice in reply.choices:
            data += events.finish(choice)
        await self._sender.end(data + events.close(reply))

    async def fail(self, refused: Refused) -> None:
        if not self._sender.began:
            raise refused
        await self._sender.end(self._events.error(refused))
