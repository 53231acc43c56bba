"""Can a recorded response be given again, whole and as a stream?"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl import plugins
from lightningrl.dialects.base import ChatRequest, Choice, Dialect, Past, Reply, TokenLogprob
from lightningrl.messages import Message, ToolCall

TURNS = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
OPENAI = [
    {},
    {"tools": [FUNCTION, {"type": "custom", "custom": {"name": "g"}}]},
    {"functions": [{"name": "f"}]},
    {"logprobs": True, "top_logprobs": 2},
    {"stream_options": {"include_usage": True}},
]
RESPONSES = [
    {},
    {"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
]
GEMINI = [
    {},
    {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
    {"generationConfig": {"responseLogprobs": True, "logprobs": 2}},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    *(("openai.chat", {"model": "m", "messages": TURNS, **more}) for more in OPENAI),
    *(("openai.completions", {"model": "m", "prompt": "x", **more}) for more in ({}, {"echo": True}, {"logprobs": 2})),
    *(("openai.responses", {"model": "m", "input": "hi", **more}) for more in RESPONSES),
    *(("anthropic.messages", {"model": "m", "messages": TURNS, **more}) for more in ({}, {"thinking": {"type": "on"}})),
    *(
        ("google.gemini", {"contents": "hi", "model": "m", "verb": "generateContent", "sse": sse, **more})
        for more in GEMINI
        for sse in (True, False)
    ),
]

words = st.text(st.characters(codec="utf-8"), max_size=8)
objects = st.dictionaries(words, st.integers(-9, 9) | words, max_size=2).map(lambda value: msgspec.json.encode(value))
arguments = objects.map(bytes.decode) | st.sampled_from(["{", "[1]", '{"input":"x"}'])
pairs = st.tuples(words, st.floats(-9, 0))


@st.composite
def choices(draw: st.DrawFn, *, raw: bool) -> Choice:
    calls: tuple[ToolCall, ...] = ()
    if not raw:
        made = draw(st.lists(st.tuples(st.sampled_from("fg"), arguments), max_size=2))
        calls = tuple(ToolCall(id=f"c{place}", name=name, arguments=text) for place, (name, text) in enumerate(made))
    thoughts = "" if raw else draw(words).strip()
    tokens = draw(st.lists(st.tuples(words, st.floats(-9, 0), st.lists(pairs, max_size=2, unique_by=lambda p: p[0]))))
    ended = "length" if draw(st.booleans()) else "tool_calls" if calls else "stop"
    return Choice(
        index=0,
        message=Message(role="assistant", content=draw(words), reasoning=thoughts, tool_calls=calls, reply_id="x_1"),
        finish_reason=ended,
        stopped_by=draw(st.none() | words) if ended == "stop" else None,
        completion_tokens=draw(st.integers(5, 9)),
        reasoning_tokens=draw(st.integers(0, 5)),
        tokens=tuple(TokenLogprob(text=text, logprob=logprob, top=tuple(top)) for text, logprob, top in tokens),
    )


def streamed(dialect: Dialect, reply: Reply) -> bytes:
    """All events, as a client gets them that joins when the answer is ready."""
    events = dialect.stream(replace(reply, choices=()))
    data = b""
    for choice in reply.choices:
        data += events.reasoning(choice.index, choice.message.reasoning) if choice.message.reasoning else b""
        data += events.text(choice.index, choice.message.content, choice.tokens) if choice.message.content else b""
        data += events.finish(choice)
    return data + events.close(reply)


def parsed(data: bytes) -> Sequence[Any]:
    """The JSON of the events. The text of arguments is compared by its meaning: some formats carry objects alone."""
    if not data.startswith((b"data", b"event")):
        return json.loads(data)
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    for event in events:
        delta = event.get("delta")
        if isinstance(delta, dict) and "partial_json" in delta:
            delta["partial_json"] = meaning(delta["partial_json"])
    return events


def meaning(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


@pytest.mark.parametrize(("name", "body"), BODIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_recorded_response_says_all_that_a_client_was_told(
    name: str, body: dict[str, Any], data: st.DataObject
) -> None:
    dialect = plugins.load(name, kind="dialect")()
    request: ChatRequest = dialect.parse(body, Past())
    choice = data.draw(choices(raw=bool(request.prompts)))
    if not request.logprobs:
        choice = replace(choice, tokens=None)
    created = 0 if name in ("anthropic.messages", "google.gemini") else 7
    told = Reply(id="x_1", request=request, created=created, prompt_tokens=30, reused_tokens=20, choices=(choice,))
    response = dialect.respond(told)
    again = dialect.reply(request, msgspec.json.decode(msgspec.json.encode(response)))
    assert dialect.respond(again) == response
    assert parsed(streamed(dialect, again)) == parsed(streamed(dialect, told))
