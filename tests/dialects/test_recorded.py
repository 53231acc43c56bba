"""Recorded calls are read again. Those of an upstream are recorded unchanged, readable or not."""

from typing import Any

import numpy as np
import pytest

from lightningrl.dialects.recorded import Reader
from lightningrl.types import Call, Capture, Sampling

NOTHING = np.array([], np.int32)


def call(index: int, dialect: str, request: Any, response: Any, *, capture: Capture = "upstream") -> Call:
    return Call(
        id=f"a-{index}",
        attempt_id="a",
        index=index,
        parent_call_id=None,
        agent="",
        policy="upstreams.there",
        policy_version=0,
        dialect=dialect,
        request={"model": "m", **request},
        response=response,
        prompt_ids=NOTHING,
        completion_ids=NOTHING,
        logprobs=NOTHING.astype(np.float32),
        sampling=Sampling(),
        finish_reason="stop",
        capture=capture,
    )


MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
CALLED = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "call_1", "id": None}


def test_a_request_is_read_with_the_earlier_response_that_it_refers_to() -> None:
    reader = Reader()
    reader.request(call(0, "openai.responses", {"input": "hello"}, {"id": "resp_1", "output": [MESSAGE]}))
    second = reader.request(call(1, "openai.responses", {"input": "more", "previous_response_id": "resp_1"}, {}))
    assert second is not None and [message.content for message in second.messages] == ["hello", "hi", "more"]


def test_an_answer_whose_items_interleave_is_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm "}]}
    output = [thought, MESSAGE, thought, {**CALLED, "id": "fc_1"}]
    answer = Reader().answer(call(0, "openai.responses", {"input": "hello"}, {"id": "resp_1", "output": output}))
    assert answer is not None and (answer.content, answer.reasoning) == ("hi", "hm hm ")
    assert [tool_call.id for tool_call in answer.tool_calls] == ["call_1"]


THOUGHT = {"type": "reasoning", "summary": 3, "id": "rs_1"}


@pytest.mark.parametrize("output", [["x", 3, None, MESSAGE], [{"type": "web_search_call"}, MESSAGE]])
def test_what_is_no_item_of_an_earlier_response_is_skipped(output: list[Any]) -> None:
    reader = Reader()
    reader.request(call(0, "openai.responses", {"input": "hello"}, {"id": "resp_1", "output": output}))
    reference = {"type": "item_reference", "id": "msg_1"}
    second = reader.request(call(1, "openai.responses", {"input": [reference]}, {}))
    assert second is not None and [message.content for message in second.messages] == ["hi"]


@pytest.mark.parametrize(
    ("item", "sent_back"),
    [
        (CALLED, {**CALLED, "id": "fc_1"}),
        (THOUGHT, {"type": "reasoning", "summary": [], "id": "rs_1"}),
        ("x", {"type": "item_reference", "id": "x"}),
    ],
)
def test_odd_items_of_an_earlier_response_raise_nothing(item: Any, sent_back: Any) -> None:
    reader = Reader()
    reader.request(call(0, "openai.responses", {"input": "hello"}, {"id": "resp_1", "output": [item]}))
    for request in ({"input": [sent_back]}, {"input": "more", "previous_response_id": "resp_1"}):
        reader.request(call(1, "openai.responses", request, {}))


@pytest.mark.parametrize("response", [{}, {"stream": "data: {}\n\n"}, {"output": 3, "choices": "x"}, {"output": ["x"]}])
@pytest.mark.parametrize(
    ("dialect", "request_body"),
    [
        ("openai.chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("openai.completions", {"prompt": "hello"}),
        ("openai.responses", {"input": "hello"}),
        ("anthropic.messages", {"messages": [{"role": "user", "content": "hello"}], "thread": {"type": "create"}}),
        ("google.gemini", {"contents": "hello"}),
    ],
)
def test_a_response_that_cannot_be_read_leaves_its_request_readable(
    dialect: str, request_body: Any, response: Any
) -> None:
    reader, recorded = Reader(), call(0, dialect, request_body, response)
    request = reader.request(recorded)
    assert request is not None and (request.prompts or request.messages[0].content == "hello")
    assert reader.answer(recorded) is None


def test_a_request_that_only_an_upstream_understands_is_none() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert Reader().request(call(0, "openai.chat", {"messages": [picture]}, {})) is None


def test_a_dialect_of_a_plugin_that_is_not_installed_is_none() -> None:
    recorded = call(0, "elsewhere.chat", {"messages": []}, {})
    assert Reader().request(recorded) is None and Reader().answer(recorded) is None


PICTURE = {"type": "image", "source": {"type": "base64", "data": ""}}
INLINE = {"inlineData": {"mimeType": "image/png", "data": ""}}
FOR_UPSTREAMS: list[tuple[str, dict[str, Any]]] = [
    (
        "openai.chat",
        {
            "n": -1,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "Error"},
                {"role": "user", "content": [{"type": "image_url"}]},
            ],
        },
    ),
    (
        "openai.responses",
        {
            "conversation": "conv_1",
            "previous_response_id": "resp_elsewhere",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}, {"type": "input_file"}]},
                {"type": "web_search_call", "id": "ws_1"},
                {"type": "item_reference", "id": "msg_elsewhere"},
                {"type": "function_call_output", "call_id": "call_1", "output": "Error"},
                {"role": "user", "content": [{"type": "input_image"}]},
            ],
        },
    ),
    (
        "anthropic.messages",
        {
            "thread": {"type": "continue", "previous_message_id": "msg_elsewhere"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "look"}, PICTURE]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "content": [PICTURE, {"type": "text", "text": "Error"}],
                        }
                    ],
                },
                {"role": "user", "content": [PICTURE]},
            ],
        },
    ),
    (
        "google.gemini",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "look"}, INLINE]},
                {
                    "parts": [
                        {
                            "functionResponse": {
                                "id": "call_1",
                                "name": "f",
                                "response": {"result": "Error"},
                                "parts": [INLINE],
                            }
                        }
                    ],
                },
                {"role": "user", "parts": [INLINE]},
            ],
        },
    ),
]


@pytest.mark.parametrize(("dialect", "body"), FOR_UPSTREAMS)
def test_a_lenient_reader_leaves_out_what_only_an_upstream_understands(dialect: str, body: dict[str, Any]) -> None:
    recorded = call(0, dialect, body, {})
    assert Reader().request(recorded) is None
    request = Reader(lenient=True).request(recorded)
    assert request is not None
    read = [(message.role, message.content, message.tool_call_id) for message in request.messages]
    assert read == [("user", "look", None), ("tool", "Error", "call_1"), ("user", "", None)]


@pytest.mark.parametrize(
    ("dialect", "response"),
    [
        (
            "openai.chat",
            {
                "choices": [
                    {
                        "message": {
                            "role": "assistant",
                            "content": [{"type": "audio"}],
                            "tool_calls": [{"id": "call_1", "function": {"name": "f"}}],
                        }
                    }
                ]
            },
        ),
        ("openai.responses", {"output": [{"type": "web_search_call"}, CALLED]}),
        ("anthropic.messages", {"content": [PICTURE, {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}]}),
        (
            "google.gemini",
            {"candidates": [{"content": {"parts": [INLINE, {"functionCall": {"id": "call_1", "name": "f"}}]}}]},
        ),
    ],
)
def test_a_lenient_reader_reads_the_tool_calls_beside_parts_of_unknown_types(dialect: str, response: Any) -> None:
    answer = Reader(lenient=True).answer(call(0, dialect, {}, response))
    assert answer is not None and [(asked.id, asked.name) for asked in answer.tool_calls] == [("call_1", "f")]


def test_a_conversation_goes_on_from_a_response_with_items_of_unknown_types() -> None:
    reader = Reader(lenient=True)
    file = {"role": "user", "content": [{"type": "input_file"}]}
    output = [{"type": "web_search_call", "id": "ws_1"}, MESSAGE]
    reader.request(call(0, "openai.responses", {"input": [file]}, {"id": "resp_1", "output": output}))
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Error"}
    later = {"input": [result], "previous_response_id": "resp_1"}
    second = reader.request(call(1, "openai.responses", later, {}))
    assert second is not None and [message.content for message in second.messages] == ["Error"]


@pytest.mark.parametrize("dialect", ["openai.chat", "openai.responses", "anthropic.messages", "google.gemini"])
def test_content_that_is_nested_too_deeply_is_skipped(dialect: str) -> None:
    nested: Any = [PICTURE]
    for _ in range(900):
        nested = [{"role": "user", "type": "tool_result", "content": nested, "parts": nested}]
    recorded = call(0, dialect, {"messages": nested, "input": nested, "contents": nested}, {"content": nested})
    reader = Reader(lenient=True)
    reader.request(recorded)
    reader.answer(recorded)
