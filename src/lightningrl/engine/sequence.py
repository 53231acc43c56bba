"""What is one generation, from the prompt to its last token? The mutable state that scheduler, cache and sampler work
on.
"""

from dataclasses import dataclass, field

from lightningrl.engine.base import Top
from lightningrl.engine.grammar import Matcher
from lightningrl.types import FinishReason, Ints, Sampling


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Belongs to the engine's thread, except for `cancelled`."""

    prompt_ids: Ints
    """[P]"""
    sampling: Sampling
    seed: int
    """In [0, 2**64): that of `sampling`, or one that the engine drew."""
    stop_ids: frozenset[int]
    """Tokens that end the completion: the model's own and the request's."""
    limit: int
    """Completion tokens at most: `max_tokens`, or what is left of the slot."""
    stream: bool
    token_ids: list[int] = field(default_factory=list[int])
    """The completion so far."""
    logprobs: list[float] = field(default_factory=list[float])
    """One per completion token."""
    top: list[Top] = field(default_factory=list[Top])
    """One per completion token if `sampling` asks for them, else empty."""
    matcher: Matcher | None = None
    """Says what `sampling.grammar` allows; None without a grammar."""
    told: int = 0
    """Completion tokens that the client has been sent."""
    row: int = -1
    """Where in the cache it lives; -1 while it waits and after it has ended."""
    finish_reason: FinishReason | None = None
    """None while it runs."""
    cancelled: bool = False
    """Set by the client's thread, read by the engine's once per step."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)
