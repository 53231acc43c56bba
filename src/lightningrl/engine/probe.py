"""Are an engine's log-probabilities those of the trainer, and of what it samples from? Ask for a few short samples."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from lightningrl.engine.base import Engine
from lightningrl.errors import EngineError
from lightningrl.types import Doubles, Ints, Sampling

PROMPTS = tuple(tuple((salt * 11 + i * i * 3 + i) % 31 + 1 for i in range(8)) for salt in range(8))
"""Token ids that every vocabulary has. Several prompts, so that each server of a pool is likely to get one."""
SAMPLING = Sampling(max_tokens=8, seed=0)
"""Not greedy: on the tokens that a model is most sure of, old and new weights agree."""
CERTAIN = Sampling(max_tokens=1, top_k=1, seed=0)
"""Only the likeliest token is possible. In narrow dtypes several can be: equal logits are all kept."""
CERTAIN_GAP = 1e-3
"""Most nats between the log-probability of such a token and that of one of `TIED` equal ones."""
TIED = 4
"""Most tokens with equal logits."""
SERVED_GAP = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Largest mean |Δ logprob| (nats) between engine and trainer with equal weights. Measured with the SQL recipe's model:
equal weights differ by 1e-6 in float32, 0.02 in bfloat16 and 0.003 in float16. A missed update makes 0.3 at a learning
rate of 5e-4 and 7e-4 at 1e-6: `engine.proof` sees what is below these limits.
"""
TIMEOUT_S = 2400.0
"""A server that died may have to start again first, which may take 30 minutes, and compile its kernels then."""

Evaluate: TypeAlias = Callable[[Sequence[tuple[Ints, Ints]]], Awaitable[Sequence[Doubles]]]
"""Prompts [P] with completions [C] → [C] each, the trainer's log-probabilities."""
Answer = TypeVar("Answer")


async def check_gap(engine: Engine, *, policy: str, version: int, dtype: str, evaluate: Evaluate) -> float:
    """Mean |Δ logprob| in nats over a few sampled completions. Raises `EngineError` if it is too large, or if either
    side is not finite.
    """
    answers = await _answers(engine, SAMPLING, policy=policy)
    asked = [(np.array(prompt, np.int32), ids) for prompt, (ids, _) in zip(PROMPTS, answers, strict=True)]
    served = np.concatenate([logprobs for _, logprobs in answers])
    gap = float(np.abs(np.concatenate(await evaluate(asked)) - served).mean())
    if not gap <= SERVED_GAP[dtype]:  # NaN fails, too
        raise EngineError(
            "the engine serves other weights than were published: "
            f"logprobs of version {version} of `{policy}` differ by `{gap:.2g}` on average",
            hint="see docs/engines.md: did every server load the folder, in the trainer's dtype?",
        )
    return gap


async def check_distribution(engine: Engine, *, policy: str) -> None:
    """Raises `EngineError` if the log-probabilities are not those of the distribution that is sampled from: raw ones
    are neither scaled nor masked, and logits are no log-probabilities.
    """
    answers = await _answers(engine, CERTAIN, policy=policy)
    wrong = [logprob for _, logprobs in answers for logprob in logprobs.tolist() if not is_certain(logprob)]
    if wrong:
        raise EngineError(
            "the engine reports logprobs of another distribution than the one it samples from: "
            f"a token that is certain has `{wrong[0]:.2g}`",
            hint="start vLLM with `--logprobs-mode processed_logprobs`",
        )


def is_certain(logprob: float) -> bool:
    """Whether a token sampled with `top_k=1` has the log-probability of the only possible one, or of one of a few with
    equal logits: 0, -log 2, …
    """
    return any(abs(logprob + math.log(count)) <= CERTAIN_GAP for count in range(1, TIED + 1))


async def in_time(answer: Awaitable[Answer]) -> Answer:
    """The answer. Raises `EngineError` if it takes longer than `TIMEOUT_S`."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await answer
    except TimeoutError:
        message = f"the engine has not answered a short prompt within `{TIMEOUT_S:g}` s"
        raise EngineError(message, hint="the server's own log says why") from None


async def _answers(engine: Engine, sampling: Sampling, *, policy: str) -> list[tuple[Ints, Doubles]]:
    """The completions of all prompts."""
    return await in_time(asyncio.gather(*(_complete(engine, prompt, sampling, policy=policy) for prompt in PROMPTS)))


async def _complete(engine: Engine, prompt: Sequence[int], sampling: Sampling, *, policy: str) -> tuple[Ints, Doubles]:
    """[C] sampled token ids, and [C] the engine's log-probabilities of them."""
    deltas = [delta async for delta in engine.generate(prompt, sampling=sampling, policy=policy)]
    token_ids = np.array([token_id for delta in deltas for token_id in delta.token_ids], np.int32)
    return token_ids, np.array([logprob for delta in deltas for logprob in delta.logprobs])
