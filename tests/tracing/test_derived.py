"""Spans of unusual bodies. tests/gateway/test_spans.py has the real SDK of each dialect."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl import plugins
from lightningrl.tracing import spans_of
from lightningrl.types import Call, Sampling

NOTHING = np.array([], np.int32)


def call(index: int, dialect: str, request: Any, response: Any, *, attempt_id: str = "a") -> Call:
    return Call(
        id=f"{attempt_id}-{index}",
        attempt_id=attempt_id,
        index=index,
        parent_call_id=None,
        agent="",
        policy="policy",
        policy_version=0,
        dialect=dialect,
        request={"model": "m", **request},
        response=response,
        prompt_ids=NOTHING,
        completion_ids=NOTHING,
        logprobs=NOTHING.astype(np.float32),
        sampling=Sampling(),
        finish_reason="stop",
        capture="rendered",
        started_at=float(index),
        ended_at=index + 0.5,
    )


def asked(*tools: tuple[str, str, str]) -> dict[str, Any]:
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name, arguments in tools
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answered(*tools: tuple[str, str, str]) -> dict[str, Any]:
    return {"choices": [{"message": asked(*tools)}]}


def told(tool_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": tool_id, "content": text}


def results(*calls: Call) -> list[tuple[str | None, str | None]]:
    return [(span.call_id, span.output) for span in spans_of(calls) if span.kind == "tool"]


def test_calls_whose_ids_a_client_has_changed_match_by_name_and_arguments() -> None:
    first = call(0, "openai.chat", {}, answered(("call_1", "f", '{"a": 1, "b": 2}'), ("call_2", "g", "{}")))
    messages = [asked(("x", "f", '{"b":2,"a":1}'), ("y", "g", "{}")), told("x", "of f"), told("y", "of g")]
    assert results(first, call(1, "openai.chat", {"messages": messages}, {})) == [("a-0", "of f"), ("a-0", "of g")]


def test_repeated_ids_belong_to_the_latest_calls() -> None:
    """Some servers count the tool calls of each answer: `call_0`, `call_0`, …"""
    tool = ("call_0", "f", "{}")
    turns = [asked(tool), told("call_0", "first"), asked(tool), told("call_0", "second")]
    calls = [
        call(0, "openai.chat", {}, answered(tool)),
        call(1, "openai.chat", {"messages": turns[:2]}, answered(tool)),
        call(2, "openai.chat", {"messages": turns}, {}),
        call(3, "openai.chat", {"messages": turns[2:]}, {}),  # without the beginning
    ]
    assert results(*calls) == [("a-0", "first"), ("a-1", "second")]
    assert results(calls[0], calls[1], calls[3]) == [("a-0", "first"), ("a-1", "second")]


def test_results_without_a_tool_call_are_no_spans() -> None:
    """Such as examples in a prompt."""
    messages = [asked(("e", "f", "{}")), told("e", "an example"), told("z", "stray")]
    assert (
        results(
            call(0, "openai.chat", {"messages": messages}, answered(("c", "g", "{}"))),
            call(1, "openai.chat", {"messages": messages}, {}),
        )
        == []
    )


def test_results_beside_a_picture_are_read() -> None:
    """Such a request goes to an upstream; the tool call may be one of the policy that is trained."""
    first = call(0, "openai.chat", {}, answered(("call_1", "f", "{}")))
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    messages = [asked(("call_1", "f", "{}")), told("call_1", "Error: no such button"), picture]
    assert results(first, call(1, "openai.chat", {"messages": messages}, {})) == [("a-0", "Error: no such button")]


@pytest.mark.parametrize("before", [["reasoning", "message", "reasoning"], ["web_search_call"], ["message", "message"]])
def test_tool_calls_of_interleaved_responses_items_are_found(before: list[str]) -> None:
    fields = {"role": "assistant", "call_id": "call_1", "name": "f"}
    items = [{"type": kind, **fields} for kind in (*before, "function_call")]
    first = call(0, "openai.responses", {"input": "hello"}, {"id": "resp_0", "output": items})
    result = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    second = call(1, "openai.responses", {"input": [result], "previous_response_id": "resp_0"}, {})
    assert results(first, second) == [("a-0", "done")]


@pytest.mark.parametrize("item", ["x", None, [1], {"type": "function_call", "id": None, "call_id": "c", "name": "f"}])
def test_an_odd_item_of_an_upstream_does_not_stop_the_reading(item: Any) -> None:
    first = call(0, "openai.responses", {"input": "hello"}, {"id": "resp_0", "output": [item]})
    back = {"type": "function_call", "call_id": "c", "name": "f"}
    later = [{"input": [back]}, {"input": "more", "previous_response_id": "resp_0"}]
    calls = [first, *(call(index, "openai.responses", body, {}) for index, body in enumerate(later, 1))]
    assert [span.kind for span in spans_of(calls)] == ["llm"] * 3


def test_gemini_results_without_ids_match_by_name_and_position() -> None:
    parts = [{"functionCall": {"name": "f", "args": {"n": n}}} for n in (1, 2)]
    first = call(0, "google.gemini", {}, {"candidates": [{"content": {"parts": parts}}]})
    told = [{"function_response": {"name": "f", "response": {"result": {"got": n}}}} for n in (1, 2)]
    second = call(
        1, "google.gemini", {"contents": [{"role": "model", "parts": parts}, {"role": "user", "parts": told}]}, {}
    )
    assert results(first, second) == [("a-0", '{"got":1}'), ("a-0", '{"got":2}')]


def test_results_match_within_their_attempt_only() -> None:
    mine, theirs = call(0, "openai.chat", {}, answered(("c", "f", "{}"))), {"messages": [told("c", "x")]}
    assert results(mine, call(1, "openai.chat", theirs, {}, attempt_id="b")) == []


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "", " "])
def test_arguments_must_be_an_object(arguments: str) -> None:
    spans = spans_of([call(0, "openai.chat", {}, answered(("c", "f", arguments)))])
    broken = [span for span in spans if span.kind == "tool"]
    assert [span.attributes.get("lightningrl.malformed") for span in broken] == ([True] if arguments.strip() else [])


def test_malformed_arguments_are_found_in_their_wrapping() -> None:
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"INVALID_JSON": "{oops"}}
    [tool, _] = spans_of([call(0, "anthropic.messages", {}, {"content": [block]})])
    assert (tool.input, tool.status) == ("{oops", "error")


KEYS = [
    "choices",
    "message",
    "messages",
    "content",
    "tool_calls",
    "function",
    "custom",
    "arguments",
    "input",
    "before",
    "type",
    "call_id",
    "role",
]
KEYS += [
    "id",
    "name",
    "candidates",
    "parts",
    "functionCall",
    "functionResponse",
    "thoughtSignature",
    "args",
    "response",
    "tool_use_id",
    "tools",
]
WORDS = ["tool", "tool_use", "tool_result", "function_call", "function_call_output", "text", "assistant"]
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=5) | st.sampled_from(WORDS)
json_values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*plugins.names("dialect"), "other"]), json_values, json_values)
def test_any_body_gives_spans(dialect: str, request: Any, response: Any) -> None:
    """Bodies of relayed calls are recorded without validation."""
    request, response = (
        {"messages": body, "input": body, "contents": body, "content": body, "choices": body}
        for body in (request, response)
    )
    spans = spans_of([call(0, dialect, request, response), call(1, dialect, response, request)])
    assert [span.kind for span in spans].count("llm") == 2
