"""How much may one attempt ask of models? Counts its calls, its sampled tokens, and the bytes of its requests.

What is beyond a limit is refused for good. The attempt goes on: its agent gets an error, and ends as it likes.
"""

from dataclasses import dataclass

from lightningrl.dialects.base import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one attempt. 0: no limit."""

    calls: int = 0
    """Answers that it may request."""
    tokens: int = 0
    """Tokens that may be sampled for it. An answer that has begun is sampled to its end."""
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

    def read(self, size: int) -> None:
        """A request of `size` bytes has arrived. Raises `Refused` if nothing more may be asked."""
        self.bytes += size
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


def _reached(what: str, setting: str) -> Refused:
    hint = f"the recipe sets `agent.{setting}`"
    return Refused(403, f"the attempt has reached a limit: {what}", code="limit_reached", hint=hint, final=True)
