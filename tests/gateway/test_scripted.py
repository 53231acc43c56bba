"""A script stands in for a model: its answers arrive as if a model had sampled them."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightningrl.chat import AnswerStream, ChatTemplate
from lightningrl.dialects.base import ChatRequest
from lightningrl.engine.base import Delta
from lightningrl.engine.conformance import CHECKS, Conformance, different_seeds_differ
from lightningrl.errors import EngineError
from lightningrl.gateway.scripted import PLAIN, Script, ScriptedEngine, current_request
from lightningrl.messages import Message, ToolCall
from lightningrl.types import Sampling

TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def plain() -> ChatTemplate:
    return ChatTemplate.load(PLAIN)


async def deltas(
    engine: ScriptedEngine, prompt_ids: Sequence[int], *, stream: bool = False, **sampling: Any
) -> list[Delta]:
    settings = Sampling(**sampling)
    return [delta async for delta in engine.generate(prompt_ids, sampling=settings, policy="policy", stream=stream)]


async def said(
    script: Script, template: ChatTemplate, *messages: Message, tools: Sequence[dict[str, Any]] = (), **sampling: Any
) -> Message:
    """The message that the agent gets."""
    messages = messages or (Message(role="user", content="hi"),)
    token = current_request.set(ChatRequest(body={}, model="m", messages=messages, tools=tuple(tools)))
    try:
        (delta,) = await deltas(ScriptedEngine(script, template), template.render(messages, tools=tools), **sampling)
    finally:
        current_request.reset(token)
    stream = AnswerStream(template, stop=sampling.get("stop", ()), tools=bool(tools), seed=b"")
    stream.feed(delta.token_ids)
    return stream.finish().message


def wishes(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (None, None),
        ({"type": "object"}, {"type": "json_object"}),
        (
            {"type": "integer"},
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "integer"}}},
        ),
    ],
)
async def test_a_script_with_that_parameter_gets_the_response_format(
    plain: ChatTemplate, schema: Any, told: Any
) -> None:
    got: list[Any] = []

    def script(prompt: str, messages: list[Any], tools: list[Any], *, response_format: Any) -> str:
        got.append(response_format)
        return "1"

    async def waiting(prompt: str, messages: list[Any], tools: list[Any], response_format: Any = "nothing") -> str:
        return script(prompt, messages, tools, response_format=response_format)

    token = current_request.set(
        ChatRequest(body={}, model="m", messages=(Message(role="user", content="hi"),), json_schema=schema)
    )
    for each in (script, waiting):
        await deltas(ScriptedEngine(each, plain), [1])
    current_request.reset(token)
    assert got == [told, told]


async def test_a_script_gets_the_prompt_the_messages_and_the_tools(plain: ChatTemplate) -> None:
    got: list[Any] = []

    def script(prompt: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        got.extend([prompt, messages, tools])
        return "done"

    call = ToolCall(id="c1", name="add", arguments='{"a":  1}')
    talk = (
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="2", tool_call_id="c1"),
    )
    assert (await said(script, plain, *talk, tools=[TOOL])).content == "done"
    prompt, messages, tools = got
    assert prompt == plain.text(talk, tools=[TOOL]) and prompt.endswith("<|im_start|>assistant\n")
    assert messages == [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert tools == [TOOL]


@pytest.mark.parametrize(
    "arguments", ['{"b":1,"a" : true}', '{ "text": "caf\\u00e9 \\"x\\"",  "n": null }', "{}", '{"é":[1, 2.50]}']
)
async def test_arguments_given_as_text_are_kept_byte_for_byte(plain: ChatTemplate, arguments: str) -> None:
    message = await said(lambda *_: [{"name": "add", "arguments": arguments}], plain, tools=[TOOL])
    assert wishes(message) == [("add", arguments)] and message.content == ""


async def test_text_thoughts_and_tool_calls_may_come_together(plain: ChatTemplate) -> None:
    async def script(*_: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        calls = [{"name": "add", "arguments": {"a": 1, "b": "ü"}}, {"function": {"name": "add", "arguments": "{}"}}]
        return {"content": "let me see", "reasoning": "hm", "tool_calls": calls}

    message = await said(script, plain, tools=[TOOL])
    assert (message.content, message.reasoning) == ("let me see", "hm")
    assert wishes(message) == [("add", '{"a": 1, "b": "ü"}'), ("add", "{}")]


async def test_a_raw_prompt_is_answered_with_text_and_the_end_of_the_turn(plain: ChatTemplate) -> None:
    (delta,) = await deltas(
        ScriptedEngine(lambda prompt, messages, tools: f"{prompt}{messages}{tools}", plain), plain.encode("once")
    )
    assert plain.decode(delta.token_ids) == "once[][]" and delta.token_ids[-1] == plain.turn_end_id


async def test_max_tokens_cuts_and_stop_strings_end_an_answer(plain: ChatTemplate) -> None:
    engine = ScriptedEngine(lambda *_: "one two three four", plain)
    (cut,) = await deltas(engine, [1], max_tokens=2)
    assert len(cut.token_ids) == 2 and cut.finish_reason == "length"
    (stopped,) = await deltas(engine, [1], stop=("two",))
    assert plain.decode(stopped.token_ids) == "one two" and stopped.finish_reason == "stop"


async def test_a_stream_comes_token_by_token_with_logprobs(plain: ChatTemplate) -> None:
    engine = ScriptedEngine(lambda *_: "one two three four", plain)
    (whole,) = await deltas(engine, [1], top_logprobs=3)
    parts = await deltas(engine, [1], stream=True)
    assert (
        tuple(token for part in parts for token in part.token_ids) == whole.token_ids
        and len(parts) == len(whole.token_ids) > 4
    )
    assert whole.logprobs == (0.0,) * len(whole.token_ids) and whole.top == tuple(
        ((token, 0.0),) for token in whole.token_ids
    )


async def test_a_slow_plain_function_does_not_block_the_event_loop(plain: ChatTemplate) -> None:
    engine = ScriptedEngine(lambda *_: time.sleep(0.3) or "late", plain)
    began = time.monotonic()
    await asyncio.gather(*(deltas(engine, [1]) for _ in range(20)))
    assert time.monotonic() - began < 3, "20 answers of 0.3 s each, one after the other, would take 6"


async def test_an_answer_without_a_reader_is_cancelled(plain: ChatTemplate) -> None:
    ended: list[bool] = []

    async def script(*_: Any) -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return ""

    engine = ScriptedEngine(script, plain)
    asking = asyncio.create_task(deltas(engine, [1]))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert ended
    await engine.pause(timeout_s=1)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (lambda *_: 1 / 0, "script `<lambda>` raised `ZeroDivisionError`: division by zero"),
        (lambda *_: exit(3), "script `<lambda>` raised `RuntimeError`: `SystemExit`: 3"),
        (lambda *_: None, "returned no valid answer: `TypeError`: `None`"),
        (lambda *_: {"text": "x"}, "returned no valid answer"),
        (lambda *_: {"content": 7}, "returned no valid answer"),
        (lambda *_: [{"arguments": "{}"}], "returned no valid answer: `KeyError`: 'name'"),
        (lambda *_: [{"name": "f", "arguments": {"x": float("nan")}}], "returned no valid answer"),
        (lambda *_: "\ud800", "returned no valid answer: `UnicodeEncodeError`"),
    ],
)
async def test_an_error_in_a_script_names_the_script(plain: ChatTemplate, script: Script, told: str) -> None:
    with pytest.raises(EngineError) as caught:
        await deltas(ScriptedEngine(script, plain), [1])
    assert told in caught.value.message


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check is not different_seeds_differ], ids=lambda c: c.__name__
)
async def test_a_scripted_engine_is_a_deterministic_engine(plain: ChatTemplate, check: Any) -> None:
    engine = ScriptedEngine(lambda *_: "some words that are long enough to be cut, and then some more of them", plain)
    try:
        await check(engine, Conformance(policy="policy", vocab_size=4000))
    finally:
        await engine.close()


@given(st.text(st.characters(codec="utf-8")))
def test_the_plain_tokenizer_loses_nothing(text: str) -> None:
    template = ChatTemplate.load(PLAIN) if not _loaded else _loaded[0]
    _loaded[:] = [template]
    assert template.decode(template.encode(text), control=True) == text


_loaded: list[ChatTemplate] = []


def test_the_plain_template_always_renders_a_message_in_the_same_way(plain: ChatTemplate) -> None:
    calls = (ToolCall(id="1", name="add", arguments='{"a": 1}'),)
    talk = [
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", content="t", reasoning="r", tool_calls=calls),
        Message(role="tool", content="2", tool_call_id="1"),
        Message(role="assistant", content="end", reasoning="r2"),
        Message(role="user", content="again"),
    ]
    texts = [plain.text(talk[:length], tools=[TOOL], open_turn=False) for length in range(2, len(talk) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert "<think>\nr\n</think>" in texts[-1] and json.dumps(TOOL) in texts[-1]
