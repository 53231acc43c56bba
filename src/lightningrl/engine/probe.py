"""Does an engine serve the weights that were published? Compare its log-probabilities with the trainer's."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from lightningrl.engine.base import Engine
from lightningrl.types import Doubles, Ints, Sampling

PROMPTS = tuple(tuple((salt * 11 + i * i * 3 + i) % 31 + 1 for i in range(8)) for salt in range(8))
"""Token ids that every vocabulary has. Several prompts, so that each server of a pool is likely to get one."""
SAMPLING = Sampling(max_tokens=8, seed=0)
"""Not greedy: on the tokens that a model is most sure of, old and new weights agree."""
TIMEOUT_S = 300.0
"""A server may compile its kernels at the first request."""


async def logprob_gap(engine: Engine, *, policy: str, logprobs: Callable[[Ints, Ints], Awaitable[Doubles]]) -> float:
    """Mean |Δ logprob| in nats over a few sampled completions. `logprobs(prompt_ids [P], completion_ids [C])` returns
    [C], the trainer's view. NaN if either side is not finite.
    """
    async with asyncio.timeout(TIMEOUT_S):
        completions = await asyncio.gather(*(_complete(engine, prompt, policy=policy) for prompt in PROMPTS))
    gaps: list[Doubles] = []
    for prompt, (token_ids, served) in zip(PROMPTS, completions, strict=True):
        gaps.append(np.abs(await logprobs(np.array(prompt, np.int32), token_ids) - served))
    return float(np.mean(np.concatenate(gaps)))


async def _complete(engine: Engine, prompt: Sequence[int], *, policy: str) -> tuple[Ints, Doubles]:
    """[C] sampled token ids, and [C] the engine's log-probabilities of them."""
    deltas = [delta async for delta in engine.generate(prompt, sampling=SAMPLING, policy=policy)]
    token_ids = np.array([token_id for delta in deltas for token_id in delta.token_ids], np.int32)
    return token_ids, np.array([logprob for delta in deltas for logprob in delta.logprobs])
