"""The interface of an engine: token ids in; sampled token ids out, each with its log-probability.

The log-probability is that of the distribution from which the token was sampled.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lightningrl.config import DeviceName, EngineConfig
from lightningrl.errors import EngineError
from lightningrl.types import FinishReason, Sampling, Weights

Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest (token id, log-probability in nats) at one position, best first."""

affinity: ContextVar[str] = ContextVar("affinity", default="")
"""Key of related generations, for example a rollout's id. Generations with one key go to one server, where they find
each other's prefixes in its cache. Set it around `Engine.generate`. Empty: the first tokens of the prompt are the key.
"""

fresh: ContextVar[bool] = ContextVar("fresh", default=False)
"""Whether a generation computes its whole prompt, without keys and values of earlier ones. Set it around
`Engine.generate`.
"""

on_server: ContextVar[int | None] = ContextVar("on_server", default=None)
"""Number of the server that answers a generation, in the order of `engine.urls`. Set it around `Engine.generate`.
None: the engine chooses.
"""


class EngineBusy(EngineError):
    """The engine is at capacity and has sampled nothing. The request may be sent again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=f"try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Unanswerable(EngineError):
    """The engine can never serve this request, or these weights. Trying again gives the same error."""


def still_running(timeout_s: float) -> EngineError:
    """The error of a `pause` that timed out."""
    return EngineError(f"generations still run after `{timeout_s}` s", hint="wait longer, or lower `max_tokens`")


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
    """One per token, in nats."""
    policy_version: int
    """Version of the weights that sampled them; the same for all deltas of one generation."""
    finish_reason: FinishReason | None = None
    """Set on the last delta only. A stop token is part of the last delta."""
    top: tuple[Top, ...] | None = None
    """One per token; None unless `Sampling.top_logprobs` asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """The arguments of an engine. A plugin is a class or function that takes this and returns an `Engine`."""

    policy: str
    """Name of the policy that the engine serves."""
    config: EngineConfig
    folder: Path
    """Hugging Face folder of the model: tokenizer, configuration, weights."""
    dtype: str
    decode: Callable[[list[int]], str]
    """Token ids → text without control tokens."""
    turn_end_id: int | None
    """Token that ends an assistant's turn; None if the chat template has none."""
    model: Any = None
    """The model (`models.base.Decoder`) that a trainer in this process updates in place. None: the engine loads
    `folder`.
    """
    device: DeviceName = "auto"
    """Where an engine in this process loads `folder`."""


class Engine(Protocol):
    """Samples completions for one policy. Every implementation passes `lightningrl.engine.conformance`."""

    def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        """Sample a completion. Without `stream`, one delta holds all of it.

        Closing the iterator early (`aclose`) cancels the generation and frees its slot. Equal prompt, sampling (with a
        seed) and weights give an equal completion, bit for bit, whatever else is being served. Before the first delta
        it raises `EngineBusy` at capacity, and `Unanswerable` for a request that it can never serve.

        Callers may set `affinity`, `fresh` and `on_server`. An engine that keeps keys and values must heed `fresh`:
        `engine.proof` takes a cache that gives other bits for one of other weights. One over several servers must heed
        `on_server`.
        """
        ...

    async def load(self, weights: Weights) -> None:
        """Serve these weights from the next generation on. The engine must be paused."""
        ...

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        """Hold back new generations and wait until the running ones have ended."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
