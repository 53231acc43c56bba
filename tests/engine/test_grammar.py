"""A grammar constrains its own request and no other."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import AnswerStream, ChatTemplate
from lightningrl.chat.grammar import grammar_of
from lightningrl.engine.base import Delta
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.engine.grammar import Grammars
from lightningrl.errors import EngineError, LightningError
from lightningrl.models.load import load_model, load_tokenizer
from lightningrl.models.tiny import build_model
from lightningrl.types import Sampling

DIGITS = 'start: "<" /[0-9]{1,6}/ ">"'
WORDS = 'start: "say" (" blue" | " red")+ "."?'
ADDRESS = """start: %json {
  "type": "object",
  "properties": {"town": {"enum": ["Oslo", "Paris"]}, "zip": {"type": "integer"}},
  "required": ["town"]
}"""
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Served:
    """The tiny model of `model_folder` with its tokenizer."""

    def __init__(self, folder: Path, *, slots: int = 8) -> None:
        self.model, self.tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
        self.end_id = self.tokenizer.eos_token_id
        self.grammars = Grammars(folder, vocab_size=self.model.vocab_size, end_id=self.end_id)
        self.engine = EmbeddedEngine(self.model, slots=slots, max_length=128, grammars=self.grammars)

    async def ask(self, sampling: Sampling, *, prompt: list[int] = PROMPT) -> Delta:
        (delta,) = [d async for d in self.engine.generate(prompt, sampling=sampling, policy="policy")]
        return delta

    def text(self, delta: Delta) -> str:
        return self.tokenizer.decode(delta.token_ids, skip_special_tokens=True)


@pytest.fixture
async def served(model_folder: Path) -> AsyncIterator[Served]:
    made = Served(model_folder)
    yield made
    await made.engine.close()


@pytest.mark.parametrize("shaping", [{}, {"temperature": 0.6}, {"temperature": 0.0}], ids=str)
async def test_logprobs_are_renormalised_over_the_allowed_tokens(served: Served, shaping: dict[str, Any]) -> None:
    sampling = Sampling(max_tokens=20, seed=3, grammar=DIGITS, **shaping)
    answer = await served.ask(sampling)
    matcher = served.grammars.matcher(DIGITS)
    for place, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        free = await served.ask(
            Sampling(max_tokens=1, seed=0, top_logprobs=served.model.vocab_size, **shaping),
            prompt=[*PROMPT, *answer.token_ids[:place]],
        )
        assert free.top is not None
        share = {t: math.exp(p) for t, p in free.top[0] if matcher.allowed[t]}
        assert logprob == pytest.approx(math.log(share[token] / sum(share.values())), abs=1e-5)
        if shaping.get("temperature") == 0.0:
            assert token == max(share, key=lambda t: share[t])
        matcher.advance(token)
    assert answer.logprobs[-1] == 0.0, "nothing but the end may follow"


async def test_top_p_and_top_k_apply_to_the_allowed_tokens(served: Served) -> None:
    greedy = await served.ask(Sampling(max_tokens=20, grammar=DIGITS, temperature=0.0))
    for shaping in (Sampling(top_k=1), Sampling(top_p=1e-9)):
        narrow = await served.ask(replace(shaping, max_tokens=20, seed=1, grammar=DIGITS))
        assert narrow.token_ids == greedy.token_ids
        assert set(narrow.logprobs) == {0.0}


async def test_other_stop_tokens_are_forbidden_under_a_grammar(served: Served) -> None:
    two = served.tokenizer.encode("2")
    for seed in range(10):
        answer = await served.ask(
            Sampling(max_tokens=40, seed=seed, grammar="start: /[12]{4}/", stop_token_ids=(*two, served.end_id))
        )
        assert served.text(answer) == "1111" and answer.token_ids[-1] == served.end_id
    with pytest.raises(EngineError, match="no token may follow"):
        await served.ask(Sampling(grammar='start: "."', stop_token_ids=tuple(served.tokenizer.encode("."))))


@pytest.mark.parametrize("fresh_slots", [1, 8])
async def test_answers_do_not_depend_on_what_else_is_served(
    served: Served, model_folder: Path, fresh_slots: int
) -> None:
    shapes = [
        Sampling(),
        Sampling(temperature=0.5, top_k=9),
        Sampling(temperature=0.0),
        Sampling(top_p=0.8, top_logprobs=3),
    ]
    grammars = [None, DIGITS, WORDS, ADDRESS]
    jobs = [replace(shapes[i % 4], grammar=grammars[i // 4 % 4], max_tokens=5 + i % 30, seed=i) for i in range(48)]
    together = await asyncio.gather(*(served.ask(job) for job in jobs))
    fresh = Served(model_folder, slots=fresh_slots)
    for job, answer in reversed(list(zip(jobs, together, strict=True))):
        assert await fresh.ask(job) == answer
    await fresh.engine.close()
    ends = {(job.grammar, a.finish_reason) for job, a in zip(jobs, together, strict=True)}
    assert {(DIGITS, "stop"), (WORDS, "stop"), (WORDS, "length"), (ADDRESS, "length")} <= ends


async def test_a_stream_shows_the_likeliest_tokens_of_the_masked_distribution(served: Served) -> None:
    sampling = Sampling(max_tokens=20, seed=2, grammar='start: "<" /[12]{4}/ ">"', top_logprobs=10)
    deltas = [d async for d in served.engine.generate(PROMPT, sampling=sampling, policy="policy", stream=True)]
    tops = [place for d in deltas for place in d.top or ()]
    assert [sum(math.exp(p) for _, p in place) for place in tops] == pytest.approx([1.0] * len(tops))
    assert {len(place) for place in tops} == {1, 2}, "forced tokens have no rivals, digits have one"
    assert tops[-1] == ((served.end_id, 0.0),)


async def test_a_client_that_reads_slowly_misses_none_of_the_likeliest_tokens(served: Served) -> None:
    sampling = Sampling(max_tokens=40, seed=2, grammar='start: "<" /[12]{30}/ ">"', top_logprobs=2)
    whole, parts = await served.ask(sampling), []
    async for delta in served.engine.generate(PROMPT, sampling=sampling, policy="policy", stream=True):
        parts.append(delta)
        await asyncio.sleep(0.02)  # several steps
    assert 1 < len(parts) < len(whole.token_ids)
    assert tuple(place for d in parts for place in d.top or ()) == whole.top


async def test_the_end_of_the_turn_ends_a_completion_even_if_the_model_has_another_end_token(served: Served) -> None:
    other = build_model(served.model.vocab_size, layers=1, eos_token_id=0)
    engine = EmbeddedEngine(other, slots=1, max_length=64, grammars=served.grammars)
    (answer,) = [
        d
        async for d in engine.generate(
            PROMPT, sampling=Sampling(max_tokens=40, seed=1, grammar=DIGITS), policy="policy"
        )
    ]
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == served.end_id != 0
    await engine.close()


async def test_a_grammar_is_compiled_once_for_simultaneous_requests(served: Served) -> None:
    grammar = "start: %json " + json.dumps({"type": "array", "items": {"enum": [f"w{i}" for i in range(500)]}})
    first = await asyncio.gather(*(served.ask(Sampling(max_tokens=8, seed=i, grammar=grammar)) for i in range(12)))
    assert len(served.grammars._compiled) == 1
    assert len({a.token_ids for a in first}) > 1


async def test_a_grammar_that_becomes_too_complex_fails_its_own_request_only(served: Served) -> None:
    free = asyncio.create_task(served.ask(Sampling(max_tokens=60, seed=1)))
    with pytest.raises(EngineError, match="the grammar cannot continue"):
        await served.ask(Sampling(max_tokens=100, seed=1, grammar=TOO_COMPLEX))
    assert (await free).finish_reason in ("stop", "length")
    assert (await served.ask(Sampling(max_tokens=20, seed=1, grammar=DIGITS))).token_ids


TOO_COMPLEX = (
    "start: ("
    + " | ".join(f"r{i}" for i in range(300))
    + ")\n"
    + "\n".join(f'r{i}: "a" r{i} | r{i} "a" | "a" "a"' for i in range(300))
)


async def test_an_untrained_model_calls_the_required_tool(served: Served, model_folder: Path) -> None:
    template = ChatTemplate.load(model_folder)
    properties = {"town": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    schema = {"type": "object", "properties": properties, "required": ["town", "days"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "book", "parameters": schema}}
    grammar = grammar_of(
        template, tools=[tool], tool_choice="required", tool_name="book", parallel_tool_calls=True, json_schema=None
    )
    answers = await asyncio.gather(
        *(served.ask(Sampling(max_tokens=120, seed=seed, grammar=grammar)) for seed in range(20))
    )
    seen = set()
    for answer in (a for a in answers if a.finish_reason == "stop"):
        stream = AnswerStream(template, stop=(), tools=True, seed=b"")
        stream.feed(answer.token_ids)
        (call,) = stream.finish().message.tool_calls
        booked = json.loads(call.arguments)
        assert call.name == "book" and booked["town"] in ("Oslo", "Rome") and 1 <= booked["days"] <= 9
        seen.add(booked["town"])
    assert seen == {"Oslo", "Rome"}


async def test_an_engine_without_a_tokenizer_refuses_grammars(model_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(model_folder))
    bare = EmbeddedEngine(model, slots=1, max_length=64)
    lost = EmbeddedEngine(
        model, slots=1, max_length=64, grammars=Grammars(tmp_path, vocab_size=model.vocab_size, end_id=2)
    )
    for engine in (bare, lost):
        with pytest.raises(LightningError, match="grammars need"):
            [_ async for _ in engine.generate(PROMPT, sampling=Sampling(grammar=DIGITS), policy="policy")]
        await engine.close()
