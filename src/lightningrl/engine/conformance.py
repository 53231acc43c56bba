"""Checks that every engine must pass. Plugin authors: make an engine for each check and run them all.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
    async def test_my_engine_conforms(check):
        engine = MyEngine(...)
        try:
            await check(engine, Conformance(policy="policy", vocab_size=300))
        finally:
            await engine.close()

A check that fails raises `AssertionError`.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.engine.base import Delta, Engine
from lightningrl.errors import LightningError
from lightningrl.types import Sampling, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """Facts about the engine that the checks need. It must fit prompts of 40 tokens with completions of 24, and 4
    generations at a time.
    """

    policy: str
    """Name of the policy that the engine serves."""
    vocab_size: int
    """Prompts have any ids below this."""
    decode: Callable[[list[int]], str] | None = None
    """Token ids → text without control tokens. Only `GRAMMAR_CHECKS` need it."""
    turn_end_id: int | None = None
    """The token that ends a complete answer. Only `GRAMMAR_CHECKS` need it."""
    weights: tuple[Weights, Weights] | None = None
    """Two different versions of the policy, for `load`. Only `LOAD_CHECKS` need them."""
    tolerance: float = 0.0
    """Largest difference between the logprobs of equal requests, in nats. On a GPU they depend on the whole batch."""
    timeout_s: float = 30.0
    """Timeout of each wait."""

    def prompt(self, length: int, *, salt: int = 0) -> list[int]:
        return [(salt * 101 + i * i * 7 + i * 3) % self.vocab_size for i in range(length)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    deltas: tuple[Delta, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t for d in self.deltas for t in d.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(p for d in self.deltas for p in d.logprobs)

    def equals(self, other: "Answer", about: Conformance) -> bool:
        """Whether both have the same tokens, finish reason and, within the tolerance, logprobs."""
        same = (self.token_ids, self.deltas[-1].finish_reason) == (other.token_ids, other.deltas[-1].finish_reason)
        return same and np.allclose(self.logprobs, other.logprobs, rtol=0.0, atol=about.tolerance)


async def ask(
    engine: Engine, prompt: Sequence[int], *, sampling: Sampling, about: Conformance, stream: bool = False
) -> Answer:
    """All deltas of one generation."""
    async with asyncio.timeout(about.timeout_s):
        return Answer(
            deltas=tuple(
                [d async for d in engine.generate(prompt, sampling=sampling, policy=about.policy, stream=stream)]
            )
        )


async def tokens_come_with_their_logprobs(engine: Engine, about: Conformance) -> None:
    answer = await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=8, seed=1), about=about)
    assert len(answer.deltas) == 1, "without `stream` there is exactly one delta"
    assert 1 <= len(answer.token_ids) <= 8
    assert len(answer.token_ids) == len(answer.logprobs)
    assert all(0 <= t < about.vocab_size for t in answer.token_ids)
    assert all(math.isfinite(p) and p <= 0 for p in answer.logprobs)
    assert answer.deltas[-1].finish_reason in ("stop", "length")


async def a_stream_says_the_same_as_a_single_answer(engine: Engine, about: Conformance) -> None:
    sampling = Sampling(max_tokens=12, seed=2)
    whole = await ask(engine, about.prompt(20), sampling=sampling, about=about)
    parts = await ask(engine, about.prompt(20), sampling=sampling, about=about, stream=True)
    assert parts.equals(whole, about)
    assert all(d.finish_reason is None for d in parts.deltas[:-1]), "only the last delta has a finish reason"
    assert len({d.policy_version for d in parts.deltas}) == 1, "one generation comes from one version"


async def the_answer_does_not_depend_on_what_else_is_served(engine: Engine, about: Conformance) -> None:
    jobs = [(about.prompt(8 + 3 * (i % 8), salt=i % 5), Sampling(max_tokens=4 + i, seed=i)) for i in range(16)]
    together = await asyncio.gather(*(ask(engine, p, sampling=s, about=about) for p, s in jobs))
    for (prompt, sampling), answer in reversed(list(zip(jobs, together, strict=True))):
        alone = await ask(engine, prompt, sampling=sampling, about=about)
        assert alone.equals(answer, about), f"a prompt of {len(prompt)} tokens was answered differently on its own"


async def greedy_needs_no_seed(engine: Engine, about: Conformance) -> None:
    answers = [
        await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=8, temperature=0.0), about=about)
        for _ in range(2)
    ]
    assert answers[0].equals(answers[1], about)


async def different_seeds_differ(engine: Engine, about: Conformance) -> None:
    seeds = [1, 2, 3, None, None]
    answers = [
        await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=16, temperature=2.0, seed=seed), about=about)
        for seed in seeds
    ]
    assert len({a.token_ids for a in answers}) > 1


async def max_tokens_ends_with_length(engine: Engine, about: Conformance) -> None:
    answers = [
        await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=1, seed=seed), about=about)
        for seed in range(4)
    ]
    assert all(len(a.token_ids) == 1 for a in answers)
    assert any(a.deltas[-1].finish_reason == "length" for a in answers)


async def a_stop_token_is_kept_and_ends_the_answer(engine: Engine, about: Conformance) -> None:
    sampling = Sampling(max_tokens=16, seed=3)
    free = await ask(engine, about.prompt(20), sampling=sampling, about=about)
    stop = free.token_ids[len(free.token_ids) // 2]
    ended = await ask(
        engine, about.prompt(20), sampling=Sampling(max_tokens=16, seed=3, stop_token_ids=(stop,)), about=about
    )
    cut = free.token_ids.index(stop) + 1
    assert ended.token_ids == free.token_ids[:cut]
    assert ended.logprobs == free.logprobs[:cut]
    assert ended.deltas[-1].finish_reason == "stop"


async def the_likeliest_tokens_are_told(engine: Engine, about: Conformance) -> None:
    plain = await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=8, seed=6), about=about)
    assert all(d.top is None for d in plain.deltas), "`top` without `top_logprobs`"
    for stream in (False, True):
        answer = await ask(
            engine,
            about.prompt(20),
            sampling=Sampling(max_tokens=8, seed=6, top_logprobs=5),
            about=about,
            stream=stream,
        )
        assert answer.equals(plain, about), "`top_logprobs` changes the completion"
        places = [place for d in answer.deltas for place in d.top or ()]
        assert len(places) == len(answer.token_ids), "one entry per token"
        for token, logprob, place in zip(answer.token_ids, answer.logprobs, places, strict=True):
            ids, values = [t for t, _ in place], [p for _, p in place]
            assert 1 <= len(place) <= 5 and len(set(ids)) == len(ids)
            assert all(0 <= t < about.vocab_size for t in ids)
            assert all(math.isfinite(p) for p in values) and sum(map(math.exp, values)) < 1 + 1e-3
            assert values == sorted(values, reverse=True), "best first"
            assert abs(dict(place).get(token, logprob) - logprob) < 1e-5, "the same distribution as the sampled token's"
            assert token in ids or logprob <= values[-1] + 1e-5, "a likelier token is missing from `top`"


async def a_grammar_is_obeyed_to_the_end(engine: Engine, about: Conformance) -> None:
    assert about.decode is not None
    grammar = 'start: "<" /[0-9]{1,3}/ ">"'
    for seed, temperature in enumerate((0.0, 1.0, 2.0)):
        sampling = Sampling(max_tokens=24, seed=seed, temperature=temperature, grammar=grammar)
        answer = await ask(engine, about.prompt(20, salt=seed), sampling=sampling, about=about)
        text = about.decode(list(answer.token_ids))
        assert re.fullmatch("<[0-9]{1,3}>", text), f"{text!r} is not in the language"
        assert answer.deltas[-1].finish_reason == "stop"
        assert answer.token_ids[-1] == about.turn_end_id, "a complete answer ends its turn"
        assert all(math.isfinite(p) and p <= 0 for p in answer.logprobs)


async def max_tokens_cuts_a_grammar(engine: Engine, about: Conformance) -> None:
    assert about.decode is not None
    answer = await ask(
        engine,
        about.prompt(20),
        sampling=Sampling(max_tokens=3, seed=7, grammar='start: "<" /[0-9]{30}/ ">"'),
        about=about,
    )
    assert answer.deltas[-1].finish_reason == "length"
    assert re.fullmatch("<[0-9]{0,30}>?", about.decode(list(answer.token_ids)))


async def a_grammar_that_cannot_be_read_is_refused(engine: Engine, about: Conformance) -> None:
    try:
        await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=4, grammar="start: nowhere"), about=about)
    except LightningError:
        return
    raise AssertionError("an engine must refuse a grammar that it cannot read")


async def closing_the_iterator_frees_the_engine(engine: Engine, about: Conformance) -> None:
    for _ in range(32):  # more than any small engine has slots
        deltas = engine.generate(
            about.prompt(20), sampling=Sampling(max_tokens=24, seed=4), policy=about.policy, stream=True
        )
        await anext(deltas)
        await deltas.aclose()  # pyright: ignore[reportAttributeAccessIssue]  generators have it
    await tokens_come_with_their_logprobs(engine, about)
    async with asyncio.timeout(about.timeout_s):
        await engine.pause(timeout_s=about.timeout_s)
    await engine.resume()


async def paused_generations_wait(engine: Engine, about: Conformance) -> None:
    await engine.pause(timeout_s=about.timeout_s)
    waiting = asyncio.create_task(ask(engine, about.prompt(20), sampling=Sampling(max_tokens=4, seed=5), about=about))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "a paused engine must not answer"
    await engine.resume()
    assert (await waiting).token_ids


async def what_was_loaded_is_served(engine: Engine, about: Conformance) -> None:
    """Each version gives its own completion of one prompt: no keys and values of other weights are reused.

    Other prompts evict the first completion's prefix from small caches. So the last completion would meet the second
    one's prefix, if the engine kept it.
    """
    assert about.weights is not None
    one, other = about.weights
    greedy = Sampling(max_tokens=8, temperature=0.0)
    answers: list[Answer] = []
    for weights in (one, other, one):
        async with asyncio.timeout(about.timeout_s):
            await engine.pause(timeout_s=about.timeout_s)
            await engine.load(weights)
            await engine.resume()
        answers.append(await ask(engine, about.prompt(40), sampling=greedy, about=about))
        assert answers[-1].deltas[-1].policy_version == weights.version, (
            "the delta names another version than the loaded one"
        )
        for salt in range(1, 17) if len(answers) == 1 else ():
            await ask(engine, about.prompt(40, salt=salt), sampling=greedy, about=about)
    first, second, again = answers
    assert first.logprobs != second.logprobs, "other weights give the same answer: were they loaded?"
    assert first.equals(again, about), "the same weights give another answer: is a cache kept across loads?"


async def an_unknown_policy_is_refused(engine: Engine, about: Conformance) -> None:
    other = Conformance(policy=f"not-{about.policy}", vocab_size=about.vocab_size)
    try:
        await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=4), about=other)
    except LightningError:
        return
    raise AssertionError("an engine must refuse a policy that it does not serve")


async def a_closed_engine_refuses(engine: Engine, about: Conformance) -> None:
    await engine.close()
    try:
        await ask(engine, about.prompt(20), sampling=Sampling(max_tokens=4), about=about)
    except LightningError:
        return
    raise AssertionError("a closed engine must not answer")


CHECKS: tuple[Callable[[Engine, Conformance], Awaitable[None]], ...] = (
    tokens_come_with_their_logprobs,
    a_stream_says_the_same_as_a_single_answer,
    the_answer_does_not_depend_on_what_else_is_served,
    greedy_needs_no_seed,
    different_seeds_differ,
    max_tokens_ends_with_length,
    a_stop_token_is_kept_and_ends_the_answer,
    the_likeliest_tokens_are_told,
    closing_the_iterator_frees_the_engine,
    paused_generations_wait,
    an_unknown_policy_is_refused,
    a_closed_engine_refuses,
)

LOAD_CHECKS: tuple[Callable[[Engine, Conformance], Awaitable[None]], ...] = (what_was_loaded_is_served,)
"""For engines whose `load` works."""

GRAMMAR_CHECKS: tuple[Callable[[Engine, Conformance], Awaitable[None]], ...] = (
    a_grammar_is_obeyed_to_the_end,
    max_tokens_cuts_a_grammar,
    a_grammar_that_cannot_be_read_is_refused,
)
"""For engines that support `Sampling.grammar`; their tokenizer must be able to write `<123>`."""
