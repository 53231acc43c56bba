"""Texts of tokens, and who brought each prompt token in."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models

from lightningrl.look.texts import Texts, texts_from
from lightningrl.look.tokens import alternatives, origins
from lightningrl.types import Attempt
from tests.cli.test_rollouts import call
from tests.gateway.conftest import Stage, stage, template  # noqa: F401

ATTEMPT = Attempt(id="r.1", rollout_id="r", number=1, token="t")


@pytest.fixture
def texts(model_folder: Path) -> Texts:
    return texts_from(model_folder / "tokenizer.json")


HARD = "say 'naïve' \U0001f9ea\U0001f9ea — 你好 <|im_start|>user\n � \x00 end<|im_end|>"


def test_joined_texts_are_the_decoded_ids(texts: Texts, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids = tokenizer.encode(HARD, add_special_tokens=False).ids
    pieces = texts.of(np.array(ids, np.int32))
    assert len(pieces) == len(ids) and "".join(pieces) == HARD and "<|im_end|>" in pieces
    assert "\U0001f9ea" in pieces, "a character of several tokens belongs to the last of them"
    assert texts.of(np.zeros(0, np.int32)) == ()


def test_half_characters_stay_where_they_are(texts: Texts, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    half = tokenizer.encode("\U0001f9ea", add_special_tokens=False).ids[:2]
    word = tokenizer.encode("word", add_special_tokens=False).ids
    pieces = texts.of(np.array([*word, *half, *word], np.int32))
    assert "".join(pieces[: len(word)]) == "word" == "".join(pieces[-len(word) :])
    assert set("".join(pieces[len(word) : len(word) + 2])) == {"�"}


def test_texts_of_a_tokenizer_that_drops_the_first_space() -> None:
    vocabulary = {"<unk>": 0, "▁say": 1, "▁a": 2, "▁word": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    assert Texts(tokenizer).of(np.array([1, 2, 3], np.int32)) == ("say", " a", " word")


def runs(found: object) -> list[tuple[int, int, str, int]]:
    assert isinstance(found, tuple)
    return [(run.start, run.end, run.origin, run.number) for run in found]


def test_the_tokens_of_a_conversation_come_from_the_calls_before() -> None:
    one = call(ATTEMPT, 0, prompt=[1, 2, 3], said=[7, 8])
    two = call(ATTEMPT, 1, prompt=[1, 2, 3, 7, 8, 4], said=[6], parent_call_id=one.id, capture="bridged")
    three = call(ATTEMPT, 2, prompt=[1, 2, 3, 7, 8, 4, 6, 5], said=[6], parent_call_id=two.id, capture="partly")
    forked = call(ATTEMPT, 3, prompt=[1, 2, 3, 7, 8, 4], said=[6], parent_call_id=one.id, capture="forked")
    found = origins([one, two, three, forked], texts={})
    assert runs(found[one.id]) == [(0, 3, "rendered", 1)]
    assert runs(found[two.id]) == [(0, 3, "rendered", 1), (3, 5, "sampled", 1), (5, 6, "rendered", 2)]
    assert runs(found[three.id]) == [*runs(found[two.id]), (6, 7, "sampled", 2), (7, 8, "rendered", 3)]
    assert runs(found[forked.id]) == [(0, 6, "rendered", 4)]


@pytest.mark.parametrize("cut", [False, True])
async def test_the_end_of_an_answer_that_was_cut_off_is_inserted(stage: Stage, texts: Texts, cut: bool) -> None:  # noqa: F811
    stage.says("the word is blue", "red")
    if cut:
        whole = stage.engine.script
        stage.engine.script = lambda ids, sampling: whole(ids, sampling)[:3]
        stage.engine.finish = "length"
    attempt = await stage.begin()
    client = AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=attempt.token)
    messages: list[dict[str, str]] = [{"role": "user", "content": "say a word"}]
    first = await client.chat.completions.create(model="m", messages=messages)  # pyright: ignore
    messages += [{"role": "assistant", "content": first.choices[0].message.content or ""}]
    messages += [{"role": "user", "content": "another one"}]
    await client.chat.completions.create(model="m", messages=messages)  # pyright: ignore
    await client.close()
    one, two = await stage.calls(attempt)
    assert two.capture == "bridged"
    found = origins([one, two], texts={two.policy: texts})[two.id]
    expected = ["rendered", "sampled", *(["inserted"] if cut else []), "rendered"]
    assert [run.origin for run in found] == expected
    assert all(before.end == after.start for before, after in itertools.pairwise(found))
    assert (found[0].start, found[-1].end) == (0, len(two.prompt_ids))
    end = len(one.prompt_ids) + len(one.completion_ids)
    assert texts.of(two.prompt_ids)[end if cut else end - 1] == "<|im_end|>"


CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize("shown", [2, 1, 0])
def test_alternatives_are_those_of_the_response(shown: int) -> None:
    def token(text: str) -> dict[str, object]:
        top = [{"token": t, "logprob": p, "bytes": None} for t, p in ((text, -0.1), ("z", -3.0))]
        return {"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": top}

    scores = {"content": [token("a"), token("b")][:shown]} if shown else None
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}
    response = {
        "id": "c",
        "created": 1,
        "choices": [CHAT["choices"][0] | {"logprobs": scores}],
        "usage": usage | details,
    }
    sampling = SimpleNamespace(top_logprobs=2)
    one = call(ATTEMPT, 0, prompt=[1], said=[2, 3], response=response, sampling=sampling)
    expected = ((("a", -0.1), ("z", -3.0)), (("b", -0.1), ("z", -3.0))) if shown == 2 else None
    assert alternatives([one], one) == expected
    assert alternatives([one], call(ATTEMPT, 0, prompt=[1], said=[2, 3], response=response)) is None
