"""What an engine promises: every token it hands out comes with the logprob under the very distribution it was drawn
from.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lightningrl.config import EngineConfig
from lightningrl.errors import EngineError
from lightningrl.types import FinishReason, Sampling, Weights

Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest (token id, logprob) at one place, best first."""

affinity: ContextVar[str] = ContextVar("affinity", default="")
"""Whose generation this is, e.g. a rollout's id: one that continues another starts from its keys and values if it
reaches the same server. Set around `Engine.generate`; empty: engines with several servers go by how the prompt begins.
"""


class EngineBusy(EngineError):
    """It has as much to do as it can take. Nothing was sampled: whoever asks may ask again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=f"try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Unanswerable(EngineError):
    """It is asked for what it cannot do: whoever asks again gets the same refusal."""


def check_policy(policy: str, *, served: str) -> None:
    """Raises `EngineError` unless `policy` is the one that the engine serves."""
    if policy != served:
        hint = "give each policy an engine of its own"
        raise EngineError(f"this engine serves `{served}`, not `{policy}`", hint=hint)


def check_prompt(length: int, *, max_length: int) -> None:
    """Raises `Unanswerable` unless a prompt of `length` tokens leaves room for a completion."""
    if not 0 < length < max_length:
        hint = "raise `engine.max_length`, or shorten the conversation"
        raise Unanswerable(f"a prompt of `{length}` tokens does not fit in `{max_length}`", hint=hint)


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
    top: tuple[Top, ...] | None = None
    """One per token; None unless `Sampling.top_logprobs` asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is made from. A plugin is a class (or a built-in function) that is called with this alone."""

    policy: str
    """The name it serves."""
    config: EngineConfig
    folder: Path
    """The Hugging Face folder of the model: tokenizer, settings, weights."""
    dtype: str
    decode: Callable[[list[int]], str]
    """Text of ids, control tokens left out."""
    turn_end_id: int | None
    """The token that ends an assistant's turn; None if the template has none."""
    model: Any = None
    """A `DenseModel` whose parameters a trainer in this process updates in place; None: the engine loads `folder`
    itself.
    """


class Engine(Protocol):
    """`lightningrl.engine.conformance` is the suite that every implementation passes."""

    def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        """Sample a completion. Without `stream` there is exactly one delta, the last.

        Closing the iterator early (`aclose`) cancels the generation and frees its slot.
        With the same prompt, sampling (seed included) and weights, the answer is the same bit for bit, whatever else is
        being served. Raises `EngineBusy`, before the first delta, when it can take no more, and `Unanswerable` for what
        it can never do.
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
