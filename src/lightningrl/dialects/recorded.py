"""How are recorded calls read? Each in its own dialect; a dialect may refer back to earlier calls of the attempt."""

from contextlib import suppress
from functools import cache

import msgspec

from lightningrl import plugins
from lightningrl.dialects.base import ChatRequest, Dialect, Past, Refused
from lightningrl.messages import Message
from lightningrl.types import Call

UNREADABLE = (Refused, msgspec.ValidationError, KeyError, IndexError, TypeError)
"""What reading an upstream's response may raise: it is recorded as it came."""


class Reader:
    """Reads the calls of one attempt, in their order."""

    def __init__(self) -> None:
        self._past = Past()

    def request(self, call: Call) -> ChatRequest | None:
        """None for a request that cannot be read: a dialect of a plugin that is not installed, content that only an
        upstream understands, or a reference to an unknown response.
        """
        dialect = _dialect(call.dialect)
        if dialect is None:
            return None
        try:
            request = dialect.parse(call.request, self._past)
        except Refused:
            return None
        if call.capture != "incomplete":
            with suppress(*UNREADABLE):
                dialect.remember(self._past, request, call.response)
        return request

    def answer(self, call: Call) -> Message | None:
        """As far as it came, if the answer broke. None for a response that cannot be read."""
        dialect = _dialect(call.dialect)
        if dialect is None:
            return None
        try:
            return dialect.answer(call.response)
        except UNREADABLE:
            return None


@cache
def _dialect(name: str) -> Dialect | None:
    return plugins.load(name, kind="dialect")() if name in plugins.names("dialect") else None
