"""Does OpenAI's SDK accept our `chat/completions`, and does the dialect read every request of the SDK?"""

import json
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from lightningrl.dialects.base import Choice, Past, Refused
from lightningrl.dialects.openai_chat import OpenAIChat
from lightningrl.messages import Message, ToolCall

from .openai_stand import CALL, TOKENS, USER, Stand, events_of, refused, says

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "look", "parameters": {"type": "object"}, "strict": True},
}
TIME = {"type": "function", "function": {"name": "time"}}
ASK: dict[str, Any] = {"model": "m", "messages": [USER]}

ANSWERS = {
    "text": says("It is ünny ."),
    "nothing": says(""),
    "cut": says("It is", finish="length"),
    "thoughts": says("sunny", reasoning="Let me\nthink"),
    "call": says(calls=[CALL]),
    "text and calls": says("let me look", calls=[CALL, ToolCall(id="call_2", name="time", arguments="{}")]),
    "logprobs": says("It is", tokens=TOKENS),
}


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())
def test_every_field_that_the_sdk_validates_is_there(said: Choice) -> None:
    stand = Stand(OpenAIChat(), [said], [said])
    client = stand.client()
    client.chat.completions.create(**ASK)
    whole = ChatCompletion.model_validate_json(stand.sent[0], strict=True)
    body = json.loads(stand.sent[0])
    assert set(body) >= {"id", "object", "created", "model", "choices", "usage"}
    assert set(body["choices"][0]) >= {"index", "message", "logprobs", "finish_reason"}
    assert set(body["choices"][0]["message"]) >= {"role", "content", "refusal"}
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (30, 9, 39)
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 20
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == (4 if said.message.reasoning else 0)
    list(client.chat.completions.create(**ASK, stream=True))
    events = events_of(stand.sent[1])
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
        assert set(event["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert stand.sent[1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())
async def test_a_stream_adds_up_to_the_whole(said: Choice) -> None:
    stand = Stand(OpenAIChat(), [said], [said])
    client = stand.async_client()
    whole = await client.chat.completions.create(**ASK)
    async with client.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as events:
        await events.until_done()  # the SDK's "final completion" refuses answers that were cut off
        streamed = events.current_completion_snapshot
    assert streamed.usage == whole.usage
    [one], [two] = whole.choices, streamed.choices
    assert (two.finish_reason, two.message.content or None) == (one.finish_reason, one.message.content or None)
    expected = [(call.id, "function", call.name, call.arguments) for call in said.message.tool_calls]
    for message in (one.message, two.message):
        calls: list[Any] = message.tool_calls or []
        assert [(call.id, call.type, call.function.name, call.function.arguments) for call in calls] == expected
    assert dump(two.logprobs) == dump(one.logprobs)
    thoughts = [getattr(message, "reasoning_content", "") for message in (one.message, two.message)]
    assert thoughts == [said.message.reasoning] * 2


def dump(model: BaseModel | None) -> Any:
    return None if model is None else model.model_dump(exclude_none=True)


def test_logprobs_have_their_alternatives() -> None:
    stand = Stand(OpenAIChat(), [says("It is", tokens=TOKENS)])
    answer = stand.client().chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    [first, second] = answer.choices[0].logprobs.content or []
    assert (first.token, first.logprob, first.bytes, second.logprob) == ("It", -0.5, [73, 116], -0.25)
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs] == [
        ("It", -0.5, [73, 116]),
        ("é", -1.5, [195, 169]),
    ]
    assert (stand.asked[0].logprobs, stand.asked[0].top_logprobs) == (True, 2)


def test_several_answers_stay_separate() -> None:
    both = [says("one", index=0), says("two !", index=1)]
    stand = Stand(OpenAIChat(), both, both)
    assert [choice.message.content for choice in stand.client().chat.completions.create(**ASK, n=2).choices] == [
        "one",
        "two !",
    ]
    with stand.client().chat.completions.stream(**ASK, n=2) as events:
        assert [choice.message.content for choice in events.get_final_completion().choices] == ["one", "two !"]


def test_a_stream_counts_tokens_only_on_request() -> None:
    stand = Stand(OpenAIChat(), [says("hello")], [says("hello")])
    list(stand.client().chat.completions.create(**ASK, stream=True))
    assert all("usage" not in event for event in events_of(stand.sent[0]))
    list(stand.client().chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    *pieces, last = events_of(stand.sent[1])
    assert all(event["usage"] is None for event in pieces)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 39)


def test_a_stream_that_breaks_raises_in_the_sdk() -> None:
    stand = Stand(OpenAIChat(), Refused(503, "the engine is full", code="engine_error"))
    with pytest.raises(openai.APIError, match="the engine is full"):
        list(stand.client().chat.completions.create(**ASK, stream=True))


@pytest.mark.parametrize(
    ("asked", "understood"),
    [
        (
            {},
            {
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "n": 1,
                "stream": False,
                "json_schema": None,
                "seed": None,
                "max_tokens": None,
            },
        ),
        ({"stop": "x", "n": 3, "seed": 5}, {"stop": ("x",), "n": 3, "seed": 5}),
        ({"stop": ["x", "", "y"]}, {"stop": ("x", "y")}),
        (
            {"stop": None, "temperature": None, "top_p": None, "tools": None, "response_format": None, "stream": None},
            {"stop": (), "tools": ()},
        ),
        ({"temperature": 0, "top_p": 0.5, "top_k": -1}, {"temperature": 0.0, "top_p": 0.5, "top_k": 0}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"tools": [WEATHER, TIME]}, {"tools": (WEATHER, TIME), "tool_choice": "auto"}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": (WEATHER,), "tool_choice": "none"}),
        (
            {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [WEATHER, TIME], "tool_choice": {"type": "function", "function": {"name": "time"}}},
            {"tools": (WEATHER, TIME), "tool_choice": "required", "tool_name": "time"},
        ),
        (
            {
                "tools": [WEATHER, TIME],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
            },
            {"tools": (TIME,), "tool_choice": "required", "tool_name": None},
        ),
        (
            {"functions": [{"name": "f"}]},
            {"tools": ({"type": "function", "function": {"name": "f"}},), "parallel_tool_calls": False},
        ),
        ({"functions": [{"name": "f"}], "function_call": {"name": "f"}}, {"tool_choice": "required", "tool_name": "f"}),
        ({"tools": [{"type": "web_search"}, WEATHER]}, {"tools": (WEATHER,), "tool_choice": "auto"}),
        ({"functions": [{"name": "f"}], "function_call": "none"}, {"tool_choice": "none"}),
        ({"response_format": {"type": "text"}}, {"json_schema": None}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
            {"json_schema": {"type": "array"}},
        ),
        ({"unheard": {"of": [1]}, "user": "me", "logit_bias": {"5": 1}, "service_tier": "flex"}, {"model": "m"}),
    ],
)
def test_a_full_request_is_read(asked: dict[str, Any], understood: dict[str, Any]) -> None:
    request = OpenAIChat().parse({**ASK, **asked}, Past())
    assert {field: getattr(request, field) for field in understood} == understood
    assert request.body == {**ASK, **asked}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}
                ]
            },
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": 5}},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": []}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    refusal = refused(OpenAIChat().parse, {**ASK, **asked})
    assert (refusal.status, refusal.param) == (400, param)
    error = OpenAIChat().error(refusal)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_all_kinds_of_messages_are_read() -> None:
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "now ?"}]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Zürich"}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "23"}]},
        {"role": "system", "content": "be briefer"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "why not"},
        {"role": "assistant", "content": None, "refusal": "never"},
        {"role": "user", "content": "go on"},
    ]
    assert list(OpenAIChat().parse({**ASK, "messages": messages}, Past()).messages) == [
        Message(role="developer", content="be brief"),
        Message(role="user", content="what now ?", name="ann"),
        Message(role="assistant", content="", tool_calls=(CALL,), reasoning="hm"),
        Message(role="tool", content="23", tool_call_id="call_1"),
        Message(role="system", content="be briefer"),
        Message(role="assistant", content="no", reasoning="why not"),
        Message(role="assistant", content="never"),
        Message(role="user", content="go on"),
    ]


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())
def test_the_answer_is_read_from_a_recorded_response(said: Choice) -> None:
    stand = Stand(OpenAIChat(), [said])
    stand.client().chat.completions.create(**ASK)
    assert OpenAIChat().answer(json.loads(stand.sent[0])) == said.message


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_functions_are_answered_in_kind(stream: bool) -> None:
    stand = Stand(OpenAIChat(), [says("let me look", calls=[CALL])], [says("sunny")])
    ask: dict[str, Any] = {"model": "m", "messages": [USER], "functions": [{"name": "weather"}]}
    if stream:
        with stand.client().chat.completions.stream(**ask) as events:
            [choice] = events.until_done().current_completion_snapshot.choices
    else:
        [choice] = stand.client().chat.completions.create(**ask).choices
    wish = choice.message.function_call
    assert wish is not None
    assert (wish.name, wish.arguments, choice.message.content, choice.finish_reason) == (
        CALL.name,
        CALL.arguments,
        "let me look",
        "function_call",
    )
    made = {"role": "assistant", "content": None, "function_call": wish.to_dict()}
    result = {"role": "function", "name": "weather", "content": "23"}
    stand.client().chat.completions.create(**{**ask, "messages": [USER, made, result]})
    _, said, answered = stand.asked[1].messages
    assert said.tool_calls == (replace(CALL, id=""),)  # this wire format has no ids
    assert answered == Message(role="function", content="23", name="weather")


def test_a_custom_tool_takes_plain_text() -> None:
    call = ToolCall(id="call_1", name="python", arguments='{"input": "print(1)"}')
    stand = Stand(OpenAIChat(), [says(calls=[call])], [says("done")])
    tools: Any = [{"type": "custom", "custom": {"name": "python", "description": "runs"}}]
    message = stand.client().chat.completions.create(**ASK, tools=tools).choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "custom"
    assert message.tool_calls[0].custom.input == "print(1)"
    assert stand.asked[0].tools[0]["function"]["name"] == "python"
    stand.client().chat.completions.create(model="m", messages=[USER, message, USER], tools=tools)  # type: ignore[list-item]
    [back] = stand.asked[1].messages[1].tool_calls
    assert (back.id, back.name, json.loads(back.arguments)) == ("call_1", "python", {"input": "print(1)"})


def test_clients_of_azure_name_the_model_in_the_path() -> None:
    stand = Stand(OpenAIChat(), [says("hello")], [says("hello")])
    http = httpx2.Client(transport=stand.transport())
    settings: dict[str, Any] = {
        "azure_endpoint": "http://stand",
        "api_key": "k",
        "api_version": "2024-10-21",
        "http_client": http,
    }
    openai.AzureOpenAI(**settings).chat.completions.create(**ASK)
    openai.AzureOpenAI(**settings, azure_deployment="org/other").chat.completions.create(**ASK)
    assert [request.model for request in stand.asked] == ["m", "org/other"]
    dialect = OpenAIChat()
    assert [dialect.match(path, "") for path in ("/completions", "/openai/chat", "/x/chat/completions")] == [None] * 3
