"""Does the dialect read the requests of Anthropic's clients, and write responses that the SDK's types accept?"""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from anthropic import types
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from lightningrl.dialects.anthropic_messages import AnthropicMessages
from lightningrl.dialects.base import ChatRequest, Choice, Past, Refused, Reply
from lightningrl.messages import Message, ToolCall

from .begun import begun

DIALECT = AnthropicMessages()
EVENTS = TypeAdapter[types.RawMessageStreamEvent](types.RawMessageStreamEvent)
BETA_EVENTS = TypeAdapter[BetaRawMessageStreamEvent](BetaRawMessageStreamEvent)
HELLO: Mapping[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
WEATHER = {
    "name": "weather",
    "description": "look",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def parse(**fields: Any) -> ChatRequest:
    return DIALECT.parse({**HELLO, **fields}, Past())


def said(*blocks: Mapping[str, Any] | str, role: str = "assistant") -> tuple[Message, ...]:
    return parse(messages=[{"role": role, "content": list(blocks)}]).messages


def choice(**fields: Any) -> Choice:
    message = Message(
        role="assistant", content=fields.pop("content", ""), reply_id="msg_1", **fields.pop("message", {})
    )
    plain: dict[str, Any] = {
        "finish_reason": "stop",
        "stopped_by": None,
        "completion_tokens": 7,
        "reasoning_tokens": 2,
        "tokens": None,
    }
    return Choice(index=0, message=message, **{**plain, **fields})


def reply(one: Choice, **fields: Any) -> Reply:
    return Reply(id="msg_1", request=parse(**fields), created=0, prompt_tokens=30, reused_tokens=20, choices=(one,))


def whole(one: Choice, **fields: Any) -> types.Message:
    body = json.loads(json.dumps(DIALECT.respond(reply(one, **fields))))
    BetaMessage.model_validate(body)
    return types.Message.model_validate(body)


def events(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n")
        body = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def streamed(one: Choice, *pieces: tuple[str, str], **fields: Any) -> tuple[list[dict[str, Any]], types.Message]:
    """The events, and the message that the SDK builds from them."""
    answer = reply(one, **fields)
    stream = DIALECT.stream(answer)
    data = b"".join(
        stream.reasoning(0, text) if kind == "reasoning" else stream.text(0, text, None) for kind, text in pieces
    )
    sent = events(data + stream.finish(one) + stream.close(answer))
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in sent:
        if event["type"] != "ping":  # the SDK drops it without parsing
            BETA_EVENTS.validate_python(event)
            snapshot = accumulate_event(
                event=EVENTS.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    return sent, types.Message.model_validate(snapshot.to_dict())


def refusal(**fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        parse(**fields)
    return caught.value


def test_the_paths_are_those_of_messages_and_their_count() -> None:
    assert DIALECT.match("/messages", "beta=true") == {}
    assert DIALECT.match("/messages/batches", "") is None
    counting = DIALECT.match("/messages/count_tokens", "beta=true")
    assert counting is not None
    counted = DIALECT.parse({**HELLO, **counting}, Past()).counted
    assert counted is not None
    assert types.MessageTokensCount.model_validate(counted(12)).input_tokens == 12
    assert parse().counted is None


def test_a_full_request_is_understood() -> None:
    schema = {"type": "object", "properties": {}}
    asked = parse(
        system="be brief",
        tools=[{**WEATHER, "strict": True, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"},
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["x", ""],
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        context_management={"edits": []},
        something_new=[1],
    )
    assert asked.messages == (Message(role="system", content="be brief"), Message(role="user", content="hello"))
    function = {"name": "weather", "description": "look", "parameters": WEATHER["input_schema"], "strict": True}
    assert asked.tools == ({"type": "function", "function": function},)
    assert (asked.tool_choice, asked.tool_name, asked.parallel_tool_calls) == ("required", "weather", False)
    assert (asked.model, asked.stream, asked.max_tokens, asked.stop) == ("m", True, 9, ("x",))
    assert (asked.temperature, asked.top_p, asked.top_k, asked.json_schema) == (0.5, 0.9, 40, schema)
    assert parse(output_format={"type": "json_schema", "schema": schema}).json_schema == schema
    assert parse(max_tokens=0).max_tokens == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ("auto", None)),
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any"}, ("required", None)),
        ({"type": "none"}, ("none", None)),
    ],
)
def test_tool_choices(given: object, expected: tuple[str, str | None]) -> None:
    asked = parse(tools=[WEATHER], tool_choice=given)
    assert (asked.tool_choice, asked.tool_name, asked.parallel_tool_calls) == (*expected, True)
    assert len(asked.tools) == 1


def test_tools_of_anthropics_servers_are_left_out_and_those_of_its_clients_are_not() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset"},
    ]
    asked = parse(tools=tools, tool_choice={"type": "any"})
    assert [tool["function"]["name"] for tool in asked.tools] == ["bash"]
    assert asked.tools[0]["function"]["parameters"]["properties"]["command"] == {"type": "string"}
    assert parse(tools=tools[:1], tool_choice={"type": "any"}).tool_choice == "auto"


def test_system_prompts_come_as_text_or_blocks_and_also_in_mid_conversation() -> None:
    blocks = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "two"},
    ]
    late = {"role": "system", "content": [{"type": "text", "text": "three"}]}
    asked = parse(system=blocks, messages=[*HELLO["messages"], late, {"role": "system", "content": "four"}])
    assert [(turn.role, turn.content) for turn in asked.messages] == [
        ("system", "one\ntwo"),
        ("user", "hello"),
        ("system", "three"),
        ("system", "four"),
    ]


def test_the_billing_line_of_claude_code_is_removed() -> None:
    def system(*texts: str) -> tuple[Message, ...]:
        return parse(system=[{"type": "text", "text": text} for text in texts]).messages[:-1]

    one = system("x-anthropic-billing-header: cc_version=2.1.1; cch=eb6c6;", "You are Claude Code")
    two = system("x-anthropic-billing-header: cc_version=2.1.1; cch=71fea;\nYou are Claude Code")
    assert one == two == (Message(role="system", content="You are Claude Code"),)
    assert system("x-anthropic-billing-header: cch=1;") == ()


def test_each_tool_result_and_text_of_a_turn_is_a_message() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "23"}
    blocks = {
        "type": "tool_result",
        "tool_use_id": "b",
        "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
    }
    failed = {"type": "tool_result", "tool_use_id": "c", "is_error": True}
    text = {"type": "text", "text": "go on"}
    assert said(result, blocks, failed, text, {"type": "text", "text": "please"}, role="user") == (
        Message(role="tool", content="23", tool_call_id="a"),
        Message(role="tool", content="x\ny", tool_call_id="b"),
        Message(role="tool", content="error", tool_call_id="c", failed=True),
        Message(role="user", content="go on\nplease"),
    )


def test_reasoning_text_and_tool_calls_of_the_assistant_are_read() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "msg_7"}
    redacted = {"type": "redacted_thinking", "data": "opaque"}
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris", "days": 2}}
    [message] = said(thinking, redacted, {"type": "text", "text": "let me "}, {"type": "text", "text": "look"}, call)
    assert message == Message(
        role="assistant",
        content="let me look",
        reasoning="hm",
        tool_calls=(ToolCall(id="call_1", name="weather", arguments='{"city":"Paris","days":2}'),),
        reply_id="msg_7",
    )
    [foreign] = said({**thinking, "signature": "EqQBCg"})
    assert (foreign.reasoning, foreign.reply_id) == ("hm", None)


def test_an_answer_that_a_client_has_split_is_one_message() -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}}
    parts = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "let me look"}, call]
    apart = parse(messages=[*HELLO["messages"], *({"role": "assistant", "content": [part]} for part in parts)]).messages
    assert apart[1:] == said(*parts)


def test_a_prefilled_answer_stays_the_last_turn() -> None:
    turns = [{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "The best answer is ("}]
    messages = parse(messages=[*HELLO["messages"], *turns]).messages
    assert [turn.content for turn in messages] == ["hello", "first", "The best answer is ("]
    assert messages[-1].role == "assistant"


def test_text_is_read_from_documents_search_results_and_unknown_blocks() -> None:
    document = {
        "type": "document",
        "title": "T",
        "source": {"type": "text", "media_type": "text/plain", "data": "body"},
    }
    nested = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "inner"}]}}
    search = {"type": "search_result", "source": "s", "title": "found", "content": [{"type": "text", "text": "hit"}]}
    new = {"type": "compaction", "content": "what was before", "encrypted_content": "x"}
    silent = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}
    [message] = said(document, nested, search, new, silent, role="user")
    assert message.content == "T\nbody\ninner\nfound\nhit\nwhat was before"
    inside = {
        "type": "tool_result",
        "tool_use_id": "a",
        "content": [{"type": "tool_reference", "tool_name": "weather"}, search],
    }
    assert said(inside, role="user")[0].content == "weather\nfound\nhit"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "u"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(b"x").decode()},
        },
        {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{"type": "image", "source": {"type": "url", "url": "u"}}],
        },
    ],
)
def test_content_without_text_is_refused(block: dict[str, Any]) -> None:
    refused = refusal(messages=[{"role": "user", "content": [block]}])
    assert refused.status == 400
    assert "is not supported" in refused.message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [3]}]}]},
        {"model": None},
        {"temperature": -1},
        {"top_p": 2},
        {"tool_choice": {"type": "tool", "name": "nobody"}},
        {"tools": [{"name": "x", "input_schema": "y"}]},
    ],
)
def test_an_invalid_request_is_refused(fields: dict[str, Any]) -> None:
    assert refusal(**fields).status == 400


def test_an_answer_is_a_message_of_the_sdk() -> None:
    call = ToolCall(id="call_1", name="weather", arguments='{"city":  "Paris", "on": true}')
    one = choice(content="let me look", finish_reason="tool_calls", message={"tool_calls": (call,), "reasoning": "hm"})
    message = whole(one, **THINK)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.id, message.stop_reason, message.stop_sequence) == ("msg_1", "tool_use", None)
    assert message.content[2].model_dump(include={"id", "name", "input"}) == {
        "id": "call_1",
        "name": "weather",
        "input": {"city": "Paris", "on": True},
    }
    usage = message.usage
    assert (
        usage.input_tokens,
        usage.cache_read_input_tokens,
        usage.cache_creation_input_tokens,
        usage.output_tokens,
    ) == (10, 20, 0, 7)
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == 2
    again = DIALECT.answer(message.to_dict())
    assert again == replace(one.message, tool_calls=(replace(call, arguments='{"city":"Paris","on":true}'),))


@pytest.mark.parametrize(
    "thinking", [{}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "omitted"}}]
)
def test_reasoning_is_sent_only_on_request(thinking: dict[str, Any]) -> None:
    one = choice(content="yes", message={"reasoning": "hm"})
    [block] = whole(one, **thinking).content
    assert (block.type, block.type == "text" and block.text) == ("text", "yes")
    _, message = streamed(one, ("reasoning", "hm"), ("text", "yes"), **thinking)
    assert [block.type for block in message.content] == ["text"]


def test_an_empty_answer_has_a_text_block() -> None:
    [block] = whole(choice()).content
    assert block.type == "text"
    assert block.text == ""
    _, message = streamed(choice())
    assert message.content == [block]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("end_turn", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"stopped_by": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "error"}, (None, None)),
    ],
)
def test_stop_reasons(fields: dict[str, Any], expected: tuple[str, str | None]) -> None:
    one = choice(content="x", **fields)
    for message in (whole(one), streamed(one, ("text", "x"))[1]):
        assert (message.stop_reason, message.stop_sequence) == expected


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    calls = (
        ToolCall(id="call_1", name="weather", arguments='{"city":  "Paris"}'),
        ToolCall(id="call_2", name="now", arguments="{}"),
    )
    one = choice(
        content='say "äöü" €\u2028', finish_reason="tool_calls", message={"tool_calls": calls, "reasoning": "hm, so"}
    )
    pieces = [
        ("reasoning", "hm,"),
        ("reasoning", " so"),
        ("text", ""),
        ("text", 'say "ä'),
        ("text", "öü"),
        ("text", '" €\u2028'),
    ]
    sent, message = streamed(one, *pieces, **THINK)
    assert message == whole(one, **THINK)
    assert [event["type"] for event in sent[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event["type"] for event in sent[-2:]] == ["message_delta", "message_stop"]
    assert [event["index"] for event in sent if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    written = [
        event["delta"]["partial_json"] for event in sent if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert written == [call.arguments for call in calls]


def test_a_stream_may_break() -> None:
    stream = DIALECT.stream(begun(parse()))
    last = events(stream.text(0, "so far", None) + stream.error(Refused(503, "the engine raised")))[-1]
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine raised"},
        "request_id": None,
    }


def test_a_thread_continues_after_its_last_answer() -> None:
    past = Past()
    created = DIALECT.parse({**HELLO, "system": "be brief", "tools": [WEATHER], "thread": {"type": "create"}}, past)
    one = choice(
        content="look",
        finish_reason="tool_calls",
        message={"tool_calls": (ToolCall(id="call_1", name="weather", arguments="{}"),)},
    )
    DIALECT.remember(past, created, DIALECT.respond(replace(reply(one), request=created)))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "23"}]}
    new = {
        "model": "m",
        "max_tokens": 9,
        "messages": [result],
        "thread": {"type": "continue", "previous_message_id": "msg_1"},
    }
    continued = DIALECT.parse(new, past)
    assert continued.body == new
    assert continued.tools == created.tools
    assert continued.messages[:2] == created.messages
    assert [(turn.role, turn.content, turn.tool_call_id) for turn in continued.messages[2:]] == [
        ("assistant", "look", None),
        ("tool", "23", "call_1"),
    ]
    with pytest.raises(Refused) as lost:
        DIALECT.parse(new, Past())
    assert (lost.value.status, DIALECT.error(lost.value)["error"]["details"]) == (
        404,
        {"error_code": "thread_not_found"},
    )
    DIALECT.remember(past, parse(), DIALECT.respond(replace(reply(one), id="msg_2")))
    assert list(past.conversations) == ["msg_1"]  # nothing else is kept


ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def test_errors_have_anthropics_names() -> None:
    for status, kind in ERRORS.items():
        error = types.ErrorResponse.model_validate(DIALECT.error(Refused(status, "no", hint="do"))).error
        assert (error.type, error.message) == (kind, "no; hint: do")
    assert (
        DIALECT.error(Refused(413, "no"))["error"]["type"] == "request_too_large"
    )  # in Anthropic's documentation, but not in its SDK


def test_arguments_that_are_no_object_are_wrapped() -> None:
    one = choice(
        finish_reason="tool_calls", message={"tool_calls": (ToolCall(id="c", name="weather", arguments="Paris"),)}
    )
    [block] = whole(one).content
    assert block.type == "tool_use"
    assert block.input == {"INVALID_JSON": "Paris"}
    assert DIALECT.answer({"content": [block.to_dict()]}).tool_calls == one.message.tool_calls
