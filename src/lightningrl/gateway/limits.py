"""How much may one attempt ask of models? Counts its calls, its sampled tokens, and the bytes of its requests.

What is beyond a limit is refused for good. The attempt goes on: its agent gets an error, and ends as it likes.
"""

from dataclasses import dataclass, field

import msgspec

from lightningrl.dialects.base import Refused
from lightningrl.gateway.refusals import ENDED
from lightningrl.types import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one attempt. 0: no limit."""

    calls: int = 0
    """Answers that it may request."""
    tokens: int = 0
    """Tokens of its answers, played back or sampled: a branch meets the limit where its trunk did. An answer that has
    begun is sampled to its end."""
    bytes: int = 0
    """Bytes of its requests, without headers."""


NO_LIMITS = Limits()


@dataclass(slots=True)
class Spent:
    """What an attempt has used so far. After a restart of the server, `bytes` has only what is recorded."""

    limits: Limits
    calls: int = 0
    """Recorded, or in the making."""
    tokens: int = 0
    bytes: int = 0
    _paid: set[str | float] = field(default_factory=set)
    """Requests whose bytes are counted: the names of those that may come again, the times of those recorded."""

    def read(self, size: int, *, request_id: str = "") -> None:
        """A request of `size` bytes has arrived. Raises `Refused` if nothing more may be asked."""
        self._pay(size, request_id)
        limits = self.limits
        if limits.bytes and self.bytes > limits.bytes:
            raise _reached(f"its requests have more than `{limits.bytes}` bytes", "max_bytes")
        if limits.tokens and self.tokens >= limits.tokens:
            raise _reached(f"`{self.tokens}` tokens have been sampled of `{limits.tokens}`", "max_tokens")

    def ask(self, answers: int) -> None:
        """A request wants so many answers. Raises `Refused` if these are too many."""
        most = self.limits.calls
        if most and self.calls + answers > most:
            raise _reached(
                f"`{self.calls}` of its `{most}` calls are used, and this request wants `{answers}`", "max_calls"
            )
        self.calls += answers

    def recall(self, call: Call) -> None:
        """A call was recorded by an earlier server. One that the server itself cut short is free: it comes again."""
        if call.capture_reason == ENDED:
            return
        self.calls += 1
        self.tokens += len(call.completion_ids)
        if self.limits.bytes:  # the answers to one request have begun at one time
            self._pay(len(msgspec.json.encode(call.request)), call.request_id or call.started_at)

    def _pay(self, size: int, request: str | float) -> None:
        if request not in self._paid:
            self.bytes += size
        if request and self.limits.bytes:
            self._paid.add(request)


def _reached(what: str, setting: str) -> Refused:
    hint = f"the recipe sets `agent.{setting}`"
    return Refused(403, f"the attempt has reached a limit: {what}", code="limit_reached", hint=hint, final=True)
