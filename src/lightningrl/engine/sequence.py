"""One generation of the embedded engine: the mutable state that scheduler, cache and sampler work on."""

from dataclasses import dataclass, field

from lightningrl.engine.base import Top
from lightningrl.engine.grammar import Matcher
from lightningrl.types import FinishReason, Ints, Sampling


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Only the engine's thread touches it, except for `cancelled`."""

    prompt_ids: Ints
    """[P]"""
    sampling: Sampling
    seed: int
    """Sampling seed in [0, 2**64): that of `sampling`, or a random one."""
    stop_ids: frozenset[int]
    """Tokens that end the completion: the model's own and the request's."""
    limit: int
    """Most completion tokens: `max_tokens`, or the room left in the row."""
    stream: bool
    fresh: bool = False
    """Whether the whole prompt is computed, without keys and values of other rows."""
    token_ids: list[int] = field(default_factory=list[int])
    """The completion so far."""
    logprobs: list[float] = field(default_factory=list[float])
    """One per completion token."""
    top: list[Top] = field(default_factory=list[Top])
    """One per completion token if `sampling.top_logprobs` is set, else empty."""
    matcher: Matcher | None = None
    """State of `sampling.grammar`; None without a grammar."""
    sent: int = 0
    """Number of completion tokens sent to the client."""
    row: int = -1
    """Row of the cache; -1 while it waits and after it has ended."""
    finish_reason: FinishReason | None = None
    """None while it runs."""
    cancelled: bool = False
    """Set by the client's thread; the engine's thread reads it once per step."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)
