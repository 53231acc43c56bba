"""Does OpenAI's SDK accept our `responses`, and does an answer stay one message however a client refers to it?"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lightningrl.dialects.base import Choice, Past, Refused
from lightningrl.dialects.openai_responses import OpenAIResponses
from lightningrl.messages import Message, ToolCall

from .begun import begun
from .openai_stand import CALL, TOKENS, Stand, events_of, refused, says

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASK: dict[str, Any] = {"model": "m", "input": "what is the weather ?"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "look",
    "parameters": {"type": "object"},
    "strict": True,
}
IN_CHAT = {
    "type": "function",
    "function": {"name": "weather", "description": "look", "parameters": {"type": "object"}, "strict": True},
}
OTHER = ToolCall(id="call_2", name="time", arguments="{}")

ANSWERS = {
    "text": says("It is ünny ."),
    "nothing": says(""),
    "cut": says("It is", finish="length"),
    "cut thoughts": says("", reasoning="Let me", finish="length"),
    "thoughts": says("sunny", reasoning="Let me\nthink"),
    "blank thoughts": says("sunny", reasoning="\n\n"),
    "call": says(calls=[CALL]),
    "all": says("let me look", reasoning="Let me\nthink", calls=[CALL, OTHER]),
    "logprobs": says("It is", tokens=TOKENS),
}
SAID = pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())


def listed(said: Choice) -> list[tuple[str, ...]]:
    """The items of an answer."""
    message = said.message
    found: list[tuple[str, ...]] = [("reasoning", message.reasoning)] if message.reasoning.strip() else []
    if message.content or not message.tool_calls:
        found.append(("message", message.content))
    return found + [("function_call", call.id, call.name, call.arguments) for call in message.tool_calls]


def items_of(response: Response) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "reasoning":
            texts = [*item.summary, *(item.content or ())]
            found.append(("reasoning", "".join(part.text for part in texts)))
        elif item.type == "message":
            found.append(("message", "".join(part.text for part in item.content if part.type == "output_text")))
        elif item.type == "function_call":
            found.append(("function_call", item.call_id, item.name, item.arguments))
    return found


@SAID
@pytest.mark.parametrize("summary", [None, "auto"])
def test_every_field_that_the_sdk_validates_is_there(said: Choice, summary: str | None) -> None:
    stand = Stand(OpenAIResponses(), [said])
    ask: dict[str, Any] = {
        "tools": [WEATHER],
        "reasoning": {"effort": "low", "summary": summary},
        "text": {"format": {"type": "json_object"}},
    }
    response = stand.client().responses.create(
        **ASK, **ask, instructions="be brief", metadata={"a": "b"}, top_logprobs=2, max_output_tokens=50
    )
    Response.model_validate_json(stand.sent[0], strict=True)
    assert items_of(response) == listed(said)
    assert (response.id, response.metadata, response.instructions, response.max_output_tokens) == (
        "resp_r_x.1-0",
        {"a": "b"},
        "be brief",
        50,
    )
    assert response.reasoning is not None
    assert (response.reasoning.effort, response.tools[0].type, response.top_logprobs) == ("low", "function", 2)
    cut = said.finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None and response.incomplete_details.reason) == (
        "max_output_tokens" if cut else False
    )
    assert response.usage is not None
    assert (
        response.usage.input_tokens,
        response.usage.input_tokens_details.cached_tokens,
        response.usage.output_tokens,
    ) == (30, 20, 9)
    assert response.usage.output_tokens_details.reasoning_tokens == (4 if said.message.reasoning else 0)


@SAID
@pytest.mark.parametrize("summary", [None, "auto"])
async def test_a_stream_adds_up_to_the_whole(said: Choice, summary: str | None) -> None:
    stand = Stand(OpenAIResponses(), [said])
    async with stand.async_client().responses.stream(**ASK, reasoning={"summary": summary}) as events:  # type: ignore[typeddict-item]
        kinds = [event.type async for event in events]
        if said.finish_reason != "length":  # the SDK keeps a final response only of `response.completed`
            assert items_of(await events.get_final_response()) == listed(said)  # type: ignore[arg-type]
    raw = events_of(stand.sent[0])
    for event in raw:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in raw] == list(range(len(raw)))
    assert [event["type"] for event in raw] == kinds
    assert [line[7:] for line in stand.sent[0].decode().split("\n") if line.startswith("event: ")] == kinds
    assert (kinds[:2], kinds[-1].partition(".")[2]) == (
        ["response.created", "response.in_progress"],
        raw[-1]["response"]["status"],
    )
    assert grown(raw) == raw[-1]["response"]["output"]
    assert items_of(Response.model_validate(raw[-1]["response"])) == listed(said)
    assert stand.past.conversations["resp_r_x.1-0"][1:] == tuple(raw[-1]["response"]["output"])


def grown(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as their deltas built them, checked against the final state in the events."""
    done: list[dict[str, Any]] = []
    text = ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            text = ""
            assert event["output_index"] == len(done)
            assert not (event["item"].get("content") or event["item"].get("arguments")), "what grows begins empty"
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "output_item.done":
            done.append(event["item"])
        if "item_id" in event:
            assert event["output_index"] == len(done)
    return done


def test_events_come_in_the_order_of_openai() -> None:
    stand = Stand(OpenAIResponses(), [ANSWERS["all"]])
    list(stand.client().responses.create(**ASK, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events_of(stand.sent[0])]
    assert list(dict.fromkeys(kinds)) == [
        *(
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
        ),
        *("output_item.done", "output_text.delta", "output_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "completed"),
    ]
    assert [kinds.count(f"output_item.{what}") for what in ("added", "done")] == [4, 4]


def test_logprobs_have_their_alternatives() -> None:
    stand = Stand(OpenAIResponses(), [says("It is", tokens=TOKENS)], [says("It is", tokens=TOKENS)])
    response = stand.client().responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    assert response.output[0].type == "message"
    [part] = response.output[0].content
    assert part.type == "output_text"
    first, second = part.logprobs or []
    assert [(token.token, token.logprob, token.bytes) for token in (first, second)] == [
        ("It", -0.5, [73, 116]),
        (" is", -0.25, [32, 105, 115]),
    ]
    assert first.top_logprobs[1].bytes == [195, 169]
    events = list(stand.client().responses.create(**ASK, top_logprobs=2, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [(event.delta, [token.token for token in event.logprobs]) for event in deltas] == [
        ("It", ["It"]),
        (" is", [" is"]),
    ]
    assert [(request.logprobs, request.top_logprobs) for request in stand.asked] == [(True, 2)] * 2


def test_tokens_without_text_are_sent_with_the_next_text() -> None:
    request = OpenAIResponses().parse({**ASK, "top_logprobs": 1}, Past())
    events = OpenAIResponses().stream(begun(request, "resp_a-0"))
    data = events.text(0, "", TOKENS[:1]) + events.text(0, "It is", TOKENS[1:]) + events.text(0, " !", None)
    data += events.text(0, "", TOKENS[:1]) + events.text(0, "?", None)
    deltas = [event for event in events_of(data) if event["type"] == "response.output_text.delta"]
    assert [[token["token"] for token in event["logprobs"]] for event in deltas] == [["It", " is"], [], ["It"]]


Back = Callable[[Response], dict[str, Any]]


def _only_the_response(response: Response) -> dict[str, Any]:
    return {"previous_response_id": response.id, "input": []}


def _references(response: Response) -> dict[str, Any]:
    return {"input": [ASK_ITEM, *({"type": "item_reference", "id": item.id} for item in response.output)]}


def _bare_references(response: Response) -> dict[str, Any]:
    return {"input": [ASK_ITEM, *({"id": item.id} for item in response.output)]}


def _items(response: Response) -> dict[str, Any]:
    return {"input": [ASK_ITEM, *(item.model_dump() for item in response.output)]}


def _items_without_thoughts(response: Response) -> dict[str, Any]:
    return {"input": [ASK_ITEM, *(item.to_dict() for item in response.output if item.type != "reasoning")]}


def _items_that_keep_nothing_on_the_server(response: Response) -> dict[str, Any]:
    dropped = {"reasoning": ("id", "content")}
    kept = [
        {key: value for key, value in item.to_dict().items() if key not in dropped.get(item.type, ("id",))}
        for item in response.output
    ]
    return {"input": [ASK_ITEM, *kept], "store": False}


ASK_ITEM = {"role": "user", "content": ASK["input"]}
WAYS = [
    _only_the_response,
    _references,
    _bare_references,
    _items,
    _items_without_thoughts,
    _items_that_keep_nothing_on_the_server,
]
"""Agent Framework, Vercel's AI SDK, OpenAI's Agents SDK, Codex."""


@pytest.mark.parametrize("back", WAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_client_sends_back_is_one_message(back: Back, stream: bool) -> None:
    stand = Stand(OpenAIResponses(), [ANSWERS["all"]], [says("sunny")])
    client = stand.client()
    ask: dict[str, Any] = {**ASK, "include": ["reasoning.encrypted_content"], "instructions": "be brief"}
    if stream:
        last = list(client.responses.create(**ask, stream=True))[-1]
        assert last.type == "response.completed"
        response = last.response
    else:
        response = client.responses.create(**ask)
    again = back(response)
    results = [{"type": "function_call_output", "call_id": call.id, "output": call.name} for call in (CALL, OTHER)]
    client.responses.create(**{**ask, **again, "input": [*again["input"], *results]})
    system, user, said, first, second = stand.asked[1].messages
    assert (system, user) == (Message(role="system", content="be brief"), Message(role="user", content=ASK["input"]))
    assert (said.role, said.content, said.tool_calls, said.reply_id) == (
        "assistant",
        "let me look",
        (CALL, OTHER),
        response.id,
    )
    assert said.reasoning == ("" if back is _items_without_thoughts else "Let me\nthink")
    assert [first, second] == [Message(role="tool", content=call.name, tool_call_id=call.id) for call in (CALL, OTHER)]


def test_two_answers_in_a_row_stay_two() -> None:
    """Outputs may stand between the calls of one answer; then only ids show that the calls belong together."""
    stand = Stand(
        OpenAIResponses(), [says(calls=[CALL, OTHER])], [says("one")], [says("two", reasoning="hm")], [says("three")]
    )
    client = stand.client()
    calls, one, two = (client.responses.create(**ASK) for _ in range(3))
    outputs = [{"type": "function_call_output", "call_id": call.id, "output": call.name} for call in (CALL, OTHER)]
    first, second = (item.to_dict() for item in calls.output)
    stranger = {"type": "function_call", "call_id": "call_x", "name": "time", "arguments": "{}"}
    items: Any = [first, outputs[0], second, outputs[1], *one.output, *two.output, stranger]
    client.responses.create(model="m", input=items)
    said = stand.asked[-1].messages
    assert [(message.role, message.content, len(message.tool_calls), message.reply_id) for message in said] == [
        ("assistant", "", 2, calls.id),
        ("tool", "weather", 0, None),
        ("tool", "time", 0, None),
        ("assistant", "one", 0, one.id),
        ("assistant", "two", 0, two.id),
        ("assistant", "", 1, None),
    ]


def test_items_of_other_servers_are_merged_by_their_order() -> None:
    thought = {"type": "reasoning", "id": "rs_x", "summary": [{"type": "summary_text", "text": "hm"}]}
    words = {
        "type": "message",
        "id": "msg_x",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "ok"}, {"type": "refusal", "refusal": "!"}],
    }
    calls = [
        {"type": "function_call", "id": "fc_x", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        for call in (CALL, OTHER)
    ]
    parts = {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "23"}]}
    items = [thought, words, *calls, parts, words, thought, words, {"role": "developer", "content": "stop"}]
    assert list(OpenAIResponses().parse({**ASK, "input": items}, Past()).messages) == [
        Message(role="assistant", reasoning="hm", content="ok!", tool_calls=(CALL, OTHER)),
        Message(role="tool", content="23", tool_call_id="call_1"),
        Message(role="assistant", content="ok!"),
        Message(role="assistant", content="ok!", reasoning="hm"),
        Message(role="developer", content="stop"),
    ]


def test_a_reference_to_an_unknown_response_is_refused() -> None:
    stand = Stand(OpenAIResponses(), [says("hello")])
    client = stand.client()
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**ASK, previous_response_id="resp_other-0")
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_other-0_0"}])
    assert missing.value.param == "input"


def test_instructions_are_not_carried_over_but_the_conversation_is() -> None:
    stand = Stand(OpenAIResponses(), *([says(word)] for word in ("one", "two", "three")))
    client = stand.client()
    first = client.responses.create(**ASK, instructions="be brief")
    second = client.responses.create(model="m", input="and now ?", previous_response_id=first.id, store=False)
    client.responses.create(model="m", input="still ?", previous_response_id=second.id, instructions="be kind")
    contents = [[message.content for message in request.messages] for request in stand.asked]
    assert contents[1] == [ASK["input"], "one", "and now ?"]
    assert contents[2] == ["be kind", ASK["input"], "one", "and now ?", "two", "still ?"]


@pytest.mark.parametrize(
    ("asked", "understood"),
    [
        (
            {},
            {
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "json_schema": None,
                "max_tokens": None,
                "logprobs": False,
                "n": 1,
            },
        ),
        ({"max_output_tokens": 5, "temperature": 0, "top_p": 0.5}, {"max_tokens": 5, "temperature": 0.0, "top_p": 0.5}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": (IN_CHAT,), "tool_choice": "none"}),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
            {"tool_choice": "required", "tool_name": "weather"},
        ),
        (
            {
                "tools": [WEATHER, {**WEATHER, "name": "x"}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]},
            },
            {"tools": (IN_CHAT,), "tool_choice": "auto"},
        ),
        (
            {"tools": [WEATHER], "parallel_tool_calls": False, "tool_choice": "required"},
            {"parallel_tool_calls": False, "tool_choice": "required"},
        ),
        ({"tools": [{"type": "web_search"}, WEATHER, {"type": "mcp", "server_label": "x"}]}, {"tools": (IN_CHAT,)}),
        (
            {"tools": [{"type": "function", "name": "f", "description": None}]},
            {"tools": ({"type": "function", "function": {"name": "f"}},)},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"json_schema": {"type": "object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "array"}}}},
            {"json_schema": {"type": "array"}},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"json_schema": None}),
        (
            {
                "text": None,
                "tools": None,
                "metadata": None,
                "reasoning": None,
                "include": None,
                "store": None,
                "stream": None,
            },
            {"tools": ()},
        ),
        (
            {
                "include": ["reasoning.encrypted_content", "new.thing"],
                "truncation": "auto",
                "user": "me",
                "unheard": [1],
            },
            {"logprobs": False},
        ),
    ],
)
def test_a_full_request_is_read(asked: dict[str, Any], understood: dict[str, Any]) -> None:
    request = OpenAIResponses().parse({**ASK, **asked}, Past())
    assert {field: getattr(request, field) for field in understood} == understood
    assert request.body == {**ASK, **asked}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"type": "message", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "computer_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"previous_response_id": ["x"]}, "previous_response_id"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    refusal = refused(OpenAIResponses().parse, {**ASK, **asked})
    assert (refusal.status, refusal.param) == (400, param)


@SAID
@pytest.mark.parametrize("summary", [None, "auto"])
def test_the_answer_is_read_from_a_recorded_response(said: Choice, summary: str | None) -> None:
    stand = Stand(OpenAIResponses(), [said])
    stand.client().responses.create(**ASK, reasoning={"summary": summary})  # type: ignore[typeddict-item]
    message = OpenAIResponses().answer(json.loads(stand.sent[0]))
    assert message == (said.message if said.message.reasoning.strip() else replace(said.message, reasoning=""))


def test_input_tokens_are_counted() -> None:
    stand = Stand(OpenAIResponses())
    counted = stand.client().responses.input_tokens.count(input="hi", instructions="be brief")
    assert (counted.input_tokens, counted.object) == (42, "response.input_tokens")
    assert [message.content for message in stand.asked[0].messages] == ["be brief", "hi"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_takes_plain_text(stream: bool) -> None:
    call = ToolCall(id="call_1", name="patch", arguments='{"input": "*** Begin"}')
    stand = Stand(OpenAIResponses(), [says(calls=[call])], [says("done")])
    tools: Any = [{"type": "custom", "name": "patch", "description": "applies"}]
    if stream:
        last = list(stand.client().responses.create(**ASK, tools=tools, stream=True))[-1]
        assert last.type == "response.completed"
        for event in events_of(stand.sent[0]):
            EVENT.validate_python(event, strict=True)
        [item] = last.response.output
    else:
        [item] = stand.client().responses.create(**ASK, tools=tools).output
    assert item.type == "custom_tool_call"
    assert (item.call_id, item.name, item.input) == ("call_1", "patch", "*** Begin")
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"}
    stand.client().responses.create(model="m", input=[item.to_dict(), output], tools=tools)  # type: ignore[list-item]
    said, result = stand.asked[1].messages
    [back] = said.tool_calls
    assert (back.id, back.name, json.loads(back.arguments)) == ("call_1", "patch", {"input": "*** Begin"})
    assert result == Message(role="tool", content="ok", tool_call_id="call_1")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_namespaces_stay_separate(stream: bool) -> None:
    """Codex puts the tools of MCP servers into namespaces."""
    call = ToolCall(id="call_1", name="mcp__files__read", arguments='{"path": "x"}')
    stand = Stand(OpenAIResponses(), [says(calls=[call])], [says("done")])
    inner = [
        {"type": "function", "name": "read", "parameters": {"type": "object"}},
        {"type": "custom", "name": "patch"},
    ]
    tools: Any = [WEATHER, {"type": "namespace", "name": "mcp__files__", "description": "files", "tools": inner}]
    if stream:
        last = list(stand.client().responses.create(**ASK, tools=tools, stream=True))[-1]
        assert last.type == "response.completed"
        response = last.response
    else:
        response = stand.client().responses.create(**ASK, tools=tools)
    Response.model_validate(response.to_dict(), strict=True)
    [item] = response.output
    assert item.type == "function_call"
    assert (item.namespace, item.name, item.arguments, item.call_id) == (
        "mcp__files__",
        "read",
        call.arguments,
        "call_1",
    )
    assert [tool["function"]["name"] for tool in stand.asked[0].tools] == [
        "weather",
        "mcp__files__read",
        "mcp__files__patch",
    ]
    stand.client().responses.create(model="m", input=[item.to_dict()], tools=tools)  # type: ignore[list-item]
    assert stand.asked[1].messages[0].tool_calls == (call,)


def test_a_stream_that_breaks_raises_in_the_sdk_and_ends_with_an_error() -> None:
    stand = Stand(OpenAIResponses(), Refused(503, "the engine is full", code="engine_error"))
    with pytest.raises(openai.APIError, match="the engine is full"):
        list(stand.client().responses.create(**ASK, stream=True))
    *_, error, failed = events_of(stand.sent[0])
    assert (error["type"], error["code"], error["message"], error["param"]) == (
        "error",
        "engine_error",
        "the engine is full",
        None,
    )
    EVENT.validate_python(failed, strict=True)
    assert (failed["type"], failed["response"]["status"], failed["response"]["error"]["code"]) == (
        "response.failed",
        "failed",
        "server_error",
    )
