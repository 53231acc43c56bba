"""What an engine promises: every token it hands out comes with the logprob under the very distribution it was drawn from."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightningrl.types import FinishReason, Sampling, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens sampled since the last delta."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token (nats)."""
    policy_version: int
    """The weights that sampled them; the same for all deltas of one generation."""
    finish_reason: FinishReason | None = None
    """None until the last delta. A token of `stop_token_ids` is part of the last delta."""


class Engine(Protocol):
    """`lightningrl.engine.conformance` is the suite that every implementation passes."""

    def generate(self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False) -> AsyncIterator[Delta]:
        """Sample a completion. Without `stream` there is exactly one delta, the last.

        Closing the iterator early (`aclose`) cancels the generation and frees its slot.
        With the same prompt, sampling (seed included) and weights, the answer is the same bit for bit, whatever else is being served.
        """
        ...

    async def load(self, weights: Weights) -> None:
        """Serve these weights from the next generation on. Call it paused."""
        ...

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        """Stop admitting generations and wait until the running ones have ended. New ones wait."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
