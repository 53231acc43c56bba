"""The proof's questions to an engine that answers otherwise than most do."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightningrl.engine import probe
from lightningrl.engine.base import Delta, Top, fresh
from lightningrl.engine.proof import Proof
from lightningrl.engine.vllm_process import START_S
from lightningrl.errors import EngineError
from lightningrl.types import Doubles, Ints, Sampling
from tests.loop.test_proof import lesson

SHORT_S = 0.05
LESSONS = [lesson(np.array([1, 2, 3]), np.arange(4, 44))]


class Terse:
    """Reports fewer likeliest tokens than it is asked for, and not always as many."""

    def __init__(self, *, fewest: int) -> None:
        self.fewest = fewest

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, policy: str, stream: bool = False):
        count = self.fewest + sum(prompt_ids) % 3
        top: Top = tuple((token_id, -1.0 - token_id) for token_id in range(count))
        told = (top,) if sampling.top_logprobs else None
        yield Delta(token_ids=(1,), logprobs=(0.0,), policy_version=0, finish_reason="length", top=told)


class Caching(Terse):
    """Answers otherwise if it has the prompt's keys and values. It keeps them when weights are loaded."""

    def __init__(self) -> None:
        super().__init__(fewest=12)
        self.known: set[tuple[int, ...]] = set()

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, policy: str, stream: bool = False):
        reused = tuple(prompt_ids) in self.known and not fresh.get()
        self.known.add(tuple(prompt_ids))
        async for delta in super().generate(prompt_ids, sampling=sampling, policy=policy):
            shifted = tuple(tuple((t, p - 1e-3 * reused) for t, p in top) for top in delta.top or ())
            yield replace(delta, top=shifted or None)


class Stuck(Terse):
    """Answers no more, of all requests or of those for likeliest tokens."""

    def __init__(self, *, answers_samples: bool) -> None:
        super().__init__(fewest=5)
        self.answers_samples = answers_samples

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, policy: str, stream: bool = False):
        if sampling.top_logprobs or not self.answers_samples:
            await asyncio.sleep(60)
        async for delta in super().generate(prompt_ids, sampling=sampling, policy=policy):
            yield delta


async def publish(engine: object) -> set[int]:
    """Two publications. Returns how many tokens the trainer was asked for after a context of the batch."""
    counts: set[int] = set()

    async def evaluate(asked: Sequence[tuple[Ints, Ints]]) -> list[Doubles]:
        counted = Counter(tuple(prompt_ids.tolist()) for prompt_ids, _ in asked)
        counts.update(count for prompt, count in counted.items() if prompt not in probe.PROMPTS)
        return [np.zeros(len(completion_ids)) for _, completion_ids in asked]

    proof = Proof(
        engine,  # pyright: ignore[reportArgumentType]  it is only asked
        policy="policy",
        dtype="float32",
        evaluate=evaluate,
        shares_weights=False,
    )
    await proof.check(0)
    await proof.before_update(LESSONS)
    await proof.trainer_before()
    await proof.trainer_after()
    await proof.check(1)
    return counts


async def test_as_many_tokens_are_compared_as_every_answer_has() -> None:
    assert await publish(Terse(fewest=5)) == {5}


async def test_an_engine_that_reports_no_likeliest_tokens_is_told_so() -> None:
    with pytest.raises(EngineError, match="the engine reports no likeliest tokens"):
        await publish(Terse(fewest=0))


@pytest.mark.parametrize("answers_samples", [True, False])
async def test_an_engine_that_does_not_answer_ends_with_an_error_that_says_so(
    answers_samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "TIMEOUT_S", SHORT_S)
    with pytest.raises(EngineError, match=r"the engine has not answered a short prompt within `0.05` s"):
        await publish(Stuck(answers_samples=answers_samples))


def test_a_server_may_start_again_before_it_answers() -> None:
    assert probe.TIMEOUT_S > START_S


async def test_the_error_about_a_cache_says_what_an_engine_with_a_cache_must_heed() -> None:
    with pytest.raises(EngineError, match="keys and values of other weights") as raised:
        await publish(Caching())
    assert "heed `engine.base.fresh`" in (raised.value.hint or "")
