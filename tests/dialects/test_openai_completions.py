"""Does OpenAI's SDK accept our `completions`, and does each prompt get its own answers?"""

import json
from typing import Any

import openai
import pytest
from openai.types import Completion

from lightningrl.dialects.base import Past, Refused
from lightningrl.dialects.openai_completions import MAX_TOKENS, OpenAICompletions
from lightningrl.messages import Message

from .openai_stand import TOKENS, Stand, events_of, refused, says

ASK: dict[str, Any] = {"model": "m", "prompt": "once upon"}


@pytest.mark.parametrize("said", [says(" a time"), says(""), says(" a", finish="length"), says("It is", tokens=TOKENS)])
def test_every_field_that_the_sdk_validates_is_there(said: Any) -> None:
    stand = Stand(OpenAICompletions(), [said], [said])
    answer = stand.client().completions.create(**ASK)
    Completion.model_validate_json(stand.sent[0], strict=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (said.message.content, said.finish_reason)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (30, 39)
    chunks = list(stand.client().completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == said.message.content
    reasons: list[Any] = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert (reasons[-1], set(reasons[:-1])) == (said.finish_reason, set(reasons[:-1]) & {None})
    assert chunks[-1].usage == answer.usage
    assert OpenAICompletions().answer(json.loads(stand.sent[0])) == Message(
        role="assistant", content=said.message.content
    )


@pytest.mark.parametrize(
    ("asked", "understood"),
    [
        ({}, {"prompts": ("once upon",), "max_tokens": MAX_TOKENS, "n": 1, "messages": (), "logprobs": False}),
        ({"prompt": ["a", "b"], "n": 2, "best_of": 2}, {"prompts": ("a", "b"), "n": 2}),
        ({"prompt": [1, 2]}, {"prompts": ((1, 2),)}),
        ({"prompt": [[1, 2], [3]]}, {"prompts": ((1, 2), (3,))}),
        ({"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
        (
            {"logprobs": 3, "max_tokens": 7, "stop": "x", "seed": 1},
            {"logprobs": True, "top_logprobs": 3, "max_tokens": 7, "stop": ("x",), "seed": 1},
        ),
        ({"suffix": None, "best_of": None, "echo": None, "stop": None, "user": "me"}, {"stop": ()}),
    ],
)
def test_a_full_request_is_read(asked: dict[str, Any], understood: dict[str, Any]) -> None:
    request = OpenAICompletions().parse({**ASK, **asked}, Past())
    assert {field: getattr(request, field) for field in understood} == understood


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 17, "n": 128}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"echo": True, "prompt": ["a", "b"]}, "echo"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    refusal = refused(OpenAICompletions().parse, {**ASK, **asked})
    assert (refusal.status, refusal.param) == (400, param)


def test_answers_keep_the_order_of_their_prompts() -> None:
    said = [says(str(index), index=index) for index in range(4)]
    stand = Stand(OpenAICompletions(), said, said)
    answer = stand.client().completions.create(model="m", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(index, str(index)) for index in range(4)]
    chunks = stand.client().completions.create(model="m", prompt=["a", "b"], n=2, stream=True)
    assert [(c.choices[0].index, c.choices[0].text) for c in chunks if c.choices[0].text] == [
        (index, str(index)) for index in range(4)
    ]


def test_logprobs_have_openais_old_shape() -> None:
    stand = Stand(OpenAICompletions(), [says("It is", tokens=TOKENS)], [says("It is", tokens=TOKENS)])
    shown = stand.client().completions.create(**ASK, logprobs=2).choices[0].logprobs
    assert shown is not None
    assert shown.model_dump() == {
        "tokens": ["It", " is"],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{"It": -0.5, "é": -1.5}, {}],
        "text_offset": [0, 2],
    }
    chunks = [chunk.choices[0].logprobs for chunk in stand.client().completions.create(**ASK, logprobs=2, stream=True)]
    assert [offset for logprobs in chunks if logprobs for offset in logprobs.text_offset or ()] == [0, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_which_is_no_part_of_the_answer(stream: bool) -> None:
    stand = Stand(OpenAICompletions(), [says(" a time")])
    if stream:
        text = "".join(
            chunk.choices[0].text for chunk in stand.client().completions.create(**ASK, echo=True, stream=True)
        )
    else:
        text = stand.client().completions.create(**ASK, echo=True).choices[0].text
        assert OpenAICompletions().answer(json.loads(stand.sent[0])).content == " a time"
    assert text == "once upon a time"


def test_a_stream_that_breaks_raises_in_the_sdk() -> None:
    stand = Stand(OpenAICompletions(), Refused(503, "the engine is full"))
    with pytest.raises(openai.APIError, match="the engine is full"):
        list(stand.client().completions.create(**ASK, stream=True))
    assert events_of(stand.sent[0])[-1]["error"]["type"] == "server_error"
