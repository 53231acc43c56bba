"""How are recorded calls read? Each in its own dialect; a dialect may refer back to earlier calls of the attempt."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from lightningrl import plugins
from lightningrl.dialects.base import TURNS, ChatRequest, Dialect, Past, Refused, TokenLogprob
from lightningrl.messages import Message
from lightningrl.types import Call

T = TypeVar("T")

UNREADABLE = (Refused, msgspec.ValidationError, KeyError, IndexError, TypeError, RecursionError)
"""What reading a relayed call may raise: it is recorded as it came."""

NESTED = (
    *TURNS,
    *("choices", "message", "candidates"),
    *("content", "parts", "output", "summary", "tool_calls", "functionResponse", "function_response"),
)
"""Fields of requests and responses that hold messages, items or parts. A lenient reader looks for bad ones there."""


class Reader:
    """Reads the calls of one attempt, in their order."""

    def __init__(self, *, lenient: bool = False) -> None:
        """`lenient`: if a conversation cannot be read as a whole, read it without the parts that prevent it, such as
        pictures and items of unknown types. Such a request has messages only.
        """
        self._lenient = lenient
        self._past = Past()

    def request(self, call: Call) -> ChatRequest | None:
        """None for a request that cannot be read: a dialect of a plugin that is not installed, content that only an
        upstream understands, or a reference to an unknown response.
        """
        dialect = _dialect(call.dialect)
        if dialect is None:
            return None

        def parse(body: Mapping[str, Any]) -> ChatRequest:
            return dialect.parse(body, self._past)

        request = _read(parse, call.request)
        if request is None and self._lenient:
            turns = {field: call.request[field] for field in TURNS if field in call.request}
            request = _read_part(parse, {"model": call.policy, **turns})
        if request is not None and call.capture != "incomplete":
            with suppress(*UNREADABLE):
                dialect.remember(self._past, request, call.response)
        return request

    def answer(self, call: Call) -> Message | None:
        """As far as it came, if the answer broke. None for a response that cannot be read."""
        dialect = _dialect(call.dialect)
        if dialect is None:
            return None
        answer = _read(dialect.answer, call.response)
        return _read_part(dialect.answer, call.response) if answer is None and self._lenient else answer

    def tokens(self, request: ChatRequest, call: Call) -> tuple[TokenLogprob, ...] | None:
        """The sampled tokens that the response shows; None if it shows none, or cannot be read."""
        dialect = _dialect(call.dialect)
        reply = None if dialect is None else _read(partial(dialect.reply, request), call.response)
        return reply.choices[0].tokens if reply is not None and reply.choices else None


@cache
def _dialect(name: str) -> Dialect | None:
    return plugins.load(name, kind="dialect")() if name in plugins.names("dialect") else None


def _read(read: Callable[[Mapping[str, Any]], T], body: Mapping[str, Any]) -> T | None:
    with suppress(*UNREADABLE):
        return read(body)
    return None


def _read_part(read: Callable[[Mapping[str, Any]], T], body: Mapping[str, Any]) -> T | None:
    """`body` without the parts that cannot be read."""
    with suppress(RecursionError):
        part = _readable(body, lambda part: _read(read, part) is not None)
        return None if part is None else read(part)
    return None


def _readable(value: Any, reads: Callable[[Any], bool]) -> Any:
    """`value` without the smallest parts that `reads` rejects; None if that is not enough."""
    if reads(value):
        return value
    if isinstance(value, list):
        parts = (_readable(part, lambda part: reads([part])) for part in value)
        kept = [part for part in parts if part is not None]
        return kept if reads(kept) else None
    if isinstance(value, Mapping):
        for field in NESTED:
            if field in value:
                part = _readable(value[field], lambda part, field=field: reads({**value, field: part}))
                if part is not None:
                    return {**value, field: part}
    return None
