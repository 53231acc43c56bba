"""How does an answer get to the client? In one piece, or as a stream of events while it is being sampled."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from lightningrl.chat import Piece
from lightningrl.dialects.base import Dialect, Refused, Reply, TokenLogprob
from lightningrl.gateway.http import EventSender, Send, respond

Show: TypeAlias = Callable[[int, Piece, Sequence[TokenLogprob] | None], Awaitable[None]]
"""Called with the number of an answer, what may be shown of it now, and the tokens that this is made of (None: nobody
asked).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """All that is to be answered, and recorded already."""

    reply: Reply
    body: Mapping[str, Any] | None
    """As it was recorded; None where several calls make one answer."""


class Delivery(Protocol):
    """The way of one answer to one client."""

    def begin(self) -> Show | None:
        """The answer is about to be sampled. None: pieces of it are of no use."""
        ...

    async def keep_alive(self) -> None:
        """Called every now and then while the answer takes its time."""
        ...

    async def give(self, answered: Any) -> None:
        """What the work on the answer has come to: `Answered`, or what an upstream has said."""
        ...

    async def fail(self, refused: Refused) -> None:
        """There will be no answer. Raises `refused` if nothing has been sent yet."""
        ...


class Whole:
    """In one piece."""

    def __init__(self, dialect: Dialect, send: Send) -> None:
        self._dialect = dialect
        self._send = send

    def begin(self) -> Show | None:
        return None

    async def keep_alive(self) -> None:
        """HTTP has nothing to say before an answer is there."""

    async def give(self, answered: Answered) -> None:
        await respond(
            self._send, 200, answered.body if answered.body is not None else self._dialect.respond(answered.reply)
        )

    async def fail(self, refused: Refused) -> None:
        raise refused


class Streamed:
    """Event by event; the terminal event follows the record."""

    def __init__(self, dialect: Dialect, send: Send, *, begun: Reply) -> None:
        """`begun`: the answer as far as it is known before anything has been sampled."""
        self._events = dialect.stream(begun)
        self._sender = EventSender(send, media_type=self._events.media_type)
        self._live = False
        """Not for a repeated request: it gets all at once."""

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
        reply, events, pieces = answered.reply, self._events, []
        for choice in () if self._live else reply.choices:
            pieces.append(events.reasoning(choice.index, choice.message.reasoning) if choice.message.reasoning else b"")
            pieces.append(
                events.text(choice.index, choice.message.content, choice.tokens) if choice.message.content else b""
            )
        pieces += [events.finish(choice) for choice in reply.choices]
        await self._sender.end(b"".join([*pieces, events.close(reply)]))

    async def fail(self, refused: Refused) -> None:
        if not self._sender.began:
            raise refused
        await self._sender.end(self._events.error(refused))
