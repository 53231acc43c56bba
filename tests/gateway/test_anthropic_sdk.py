"""Does Anthropic's SDK work over a real socket, and is each of its calls recorded and linked token by token?"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import numpy as np
import pydantic
import pytest
from anthropic import beta_async_tool, beta_tool
from anthropic.types import Message, MessageParam, ToolParam

from lightningrl.types import Attempt, Call

from .conftest import Stage

HELLO: MessageParam = {"role": "user", "content": "what is the weather ?"}
WEATHER: ToolParam = {
    "name": "weather",
    "description": "look",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WISH = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'


@pytest.fixture
async def attempt(stage: Stage) -> Attempt:
    return await stage.begin()


@pytest.fixture
async def client(stage: Stage, attempt: Attempt) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        yield client


def continues(call: Call, parent: Call) -> bool:
    """The chain of calls is exact to the token."""
    said = np.concatenate((parent.prompt_ids, parent.completion_ids))
    return (
        call.capture == "bridged"
        and call.parent_call_id == parent.id
        and call.prompt_ids[: len(said)].tolist() == said.tolist()
    )


def billed(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_an_answer_is_recorded_token_by_token(
    stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic
) -> None:
    extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}  # this SDK has no parameters for them any more
    message = await client.messages.create(
        model="writer", max_tokens=50, messages=[HELLO], stop_sequences=["x"], extra_body=extra
    )
    [call] = await stage.calls(attempt)
    _, sampling, _ = stage.engine.asked[0]
    [block] = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.model) == ("hello", "end_turn", "writer")
    assert (billed(message), message.usage.output_tokens) == (len(call.prompt_ids), len(call.completion_ids))
    assert call.prompt_ids.tolist() == stage.template.encode(
        "<|im_start|>user\nwhat is the weather ?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.stop) == (
        0.5,
        0.9,
        40,
        50,
        ("x",),
    )
    assert (message.id, call.dialect, call.capture) == (call.id, "anthropic.messages", "rendered")
    assert call.response == message.to_dict()
    assert call.request["messages"] == [HELLO]


async def test_a_stream_has_the_same_answer_and_record(
    stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic
) -> None:
    stage.says("It is sunny in Paris . äöü €")
    whole = await client.messages.create(model="m", max_tokens=50, messages=[HELLO])
    async with client.messages.stream(model="m", max_tokens=50, messages=[HELLO]) as stream:
        pieces = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert len(pieces) > 5
    assert "".join(pieces) == "It is sunny in Paris . äöü €"
    assert final.to_dict(exclude_unset=True)["content"] == whole.to_dict()["content"]
    assert (final.stop_reason, final.usage.output_tokens, billed(final)) == (
        whole.stop_reason,
        whole.usage.output_tokens,
        billed(whole),
    )
    one, two = await stage.calls(attempt)
    assert two.completion_ids.tolist() == one.completion_ids.tolist()
    assert two.response["content"] == one.response["content"]
    assert final.id == two.id


async def test_the_sync_client_and_the_beta_namespace_work_too(stage: Stage, attempt: Attempt) -> None:
    def talk() -> list[str]:
        said: list[str] = []
        with anthropic.Anthropic(base_url=f"{stage.url}/r/{attempt.token}", api_key="none") as client:
            said.append(client.messages.create(model="m", max_tokens=9, messages=[HELLO]).to_json())
            said.append(
                client.beta.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}], betas=["b"]
                ).to_json()
            )
            with client.messages.stream(model="m", max_tokens=9, messages=[HELLO]) as stream:
                said.append(stream.get_final_message().to_json())
            events = client.messages.create(model="m", max_tokens=9, messages=[HELLO], stream=True)
            said.append(
                "".join(
                    e.delta.text for e in events if e.type == "content_block_delta" and e.delta.type == "text_delta"
                )
            )
        return said

    assert all("hello" in said for said in await asyncio.to_thread(talk))
    assert len(await stage.calls(attempt)) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_the_turn_after_a_tool_call_is_bridged(
    stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic, stream: bool
) -> None:
    stage.says(f"let me look\n{WISH}", "sunny", "bye")
    asked: dict[str, Any] = {"model": "m", "max_tokens": 99, "system": "be brief", "tools": [WEATHER]}
    messages: list[MessageParam] = [HELLO]
    if stream:
        async with client.messages.stream(messages=messages, **asked) as events:
            arguments = [event.partial_json async for event in events if event.type == "input_json"]
            message = await events.get_final_message()
        assert "".join(arguments) == '{"city":  "Paris"}'  # byte for byte
    else:
        message = await client.messages.create(messages=messages, **asked)
    text, wish = message.content
    assert message.stop_reason == "tool_use"
    assert (text.type, wish.type) == ("text", "tool_use")
    assert wish.type == "tool_use"
    assert (wish.name, wish.input) == ("weather", {"city": "Paris"})
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": wish.id, "content": "23 degrees"}],
    }
    messages += [message.to_param(), result]
    answer = await client.messages.create(messages=messages, **asked)
    assert answer.stop_reason == "end_turn"
    first, second = await stage.calls(attempt)
    assert continues(second, first)
    assert answer.usage.cache_read_input_tokens == len(first.prompt_ids) + len(first.completion_ids)
    # as clients do: without reasoning and text, cache markers moved, text beside the next result
    bare: MessageParam = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": wish.id, "name": "weather", "input": {"city": "Paris"}}],
    }
    content: Any = result["content"]
    moved: Any = {"role": "user", "content": [{**content[0], "cache_control": {"type": "ephemeral"}}]}
    said: MessageParam = {"role": "assistant", "content": "sunny"}
    await client.messages.create(messages=[HELLO, bare, moved, said, {"role": "user", "content": "and now ?"}], **asked)
    assert continues((await stage.calls(attempt))[-1], second)


async def test_an_agent_of_the_sdks_own_tool_runner(
    stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic
) -> None:
    asked: list[str] = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Look out of the window.

        Args:
            city: where
        """
        asked.append(city)
        return f"23 degrees in {city}"

    stage.says(f"{WISH}\n{WISH.replace('Paris', 'Rome')}", "warm in both")
    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=99, messages=[{"role": "user", "content": "compare"}], tools=[weather]
    )
    final = await runner.until_done()
    assert asked == ["Paris", "Rome"]
    assert final.content[0].to_dict()["text"] == "warm in both"
    first, second = await stage.calls(attempt)
    assert continues(second, first)
    thread = {"type": "continue", "previous_message_id": first.id}
    assert second.request["thread"] == thread, "the SDK sends new turns only"
    assert "tools" not in second.request


async def test_a_thread_outlives_the_process(stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic) -> None:
    thread = client.beta.messages.thread(model="m", max_tokens=99, system="be brief")
    stage.says("one", "two", "three")
    await thread.send({"role": "user", "content": "count"})
    stage.gateway.sessions._sessions.clear()  # as after a restart: only the store remains
    await thread.send({"role": "user", "content": "go on"})
    assert thread.previous_message_id is not None
    first, second = await stage.calls(attempt)
    assert continues(second, first)


async def test_the_sdk_starts_a_lost_thread_anew(
    stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic
) -> None:
    thread = client.beta.messages.thread(model="m", max_tokens=99)
    stage.says("one", "two")
    await thread.send({"role": "user", "content": "count"})
    next(iter(stage.gateway.sessions._sessions.values())).past.conversations.clear()
    await thread.send({"role": "user", "content": "go on"})
    first, second = await stage.calls(attempt)
    assert second.request["thread"] == {"type": "create"}
    assert continues(second, first)


async def test_a_streaming_agent_of_the_sync_tool_runner(stage: Stage, attempt: Attempt) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """Look out of the window."""
        return f"23 degrees in {city}"

    def talk() -> list[str]:
        with anthropic.Anthropic(base_url=stage.url, api_key=attempt.token) as client:
            runner = client.beta.messages.tool_runner(
                model="m", max_tokens=99, messages=[{"role": "user", "content": "?"}], tools=[weather], stream=True
            )
            return [stream.get_final_message().content[-1].type for stream in runner]

    stage.says(f"let me look\n{WISH}", "sunny")
    assert await asyncio.to_thread(talk) == ["tool_use", "text"]
    first, second = await stage.calls(attempt)
    assert continues(second, first)


async def test_the_token_count_is_that_of_the_recorded_prompt(
    stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic
) -> None:
    stage.says(f"{WISH}", "sunny")
    asked: dict[str, Any] = {
        "model": "m",
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
    }
    messages: list[MessageParam] = [HELLO]
    for _ in range(2):
        counted = await client.messages.count_tokens(messages=messages, **asked)
        beta = await client.beta.messages.count_tokens(messages=messages, **asked)  # pyright: ignore[reportArgumentType]
        message = await client.messages.create(messages=messages, max_tokens=99, **asked)
        assert counted.input_tokens == beta.input_tokens == billed(message)
        wish = message.content[0]
        if wish.type == "tool_use":
            messages += [
                message.to_param(),
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": wish.id, "content": "23"}]},
            ]
    first, second = await stage.calls(attempt)
    assert continues(second, first)


async def test_a_conversation_of_claude_code_is_bridged(stage: Stage, attempt: Attempt) -> None:
    """x-api-key, always streaming, changing billing lines, moving cache markers, late system messages, reminders."""
    headers = {
        "x-api-key": attempt.token,
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

    async def send(client: httpx2.AsyncClient, number: int, *turns: dict[str, Any]) -> list[dict[str, Any]]:
        system = [
            f"x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={number};",
            "You are Claude Code",
            "Be brief",
        ]
        body = {
            "model": "claude",
            "max_tokens": 64000,
            "stream": True,
            "system": [{"type": "text", "text": text, **(mark if place else {})} for place, text in enumerate(system)],
            "messages": turns,
            "tools": [{**WEATHER, "eager_input_streaming": True}],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }
        answer = await client.post("/v1/messages?beta=true", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]

    stage.says("title", f"let me look\n{WISH}", "sunny")
    reminder = {"type": "text", "text": "<system-reminder>hi</system-reminder>"}
    async with httpx2.AsyncClient(base_url=stage.url, headers=headers) as client:
        await send(client, 1, {"role": "user", "content": [{"type": "text", "text": "write a title"}]})
        events = await send(
            client, 2, {"role": "user", "content": [reminder, {"type": "text", "text": "weather ?", **mark}]}
        )
        wish = next(
            event["content_block"] for event in events if event.get("content_block", {}).get("type") == "tool_use"
        )
        said = {
            "role": "assistant",
            "content": [{"type": "text", "text": "let me look"}, {**wish, "input": {"city": "Paris"}}],
        }
        result = {
            "type": "tool_result",
            "tool_use_id": wish["id"],
            "content": [{"type": "text", "text": "23"}],
            "is_error": False,
            **mark,
        }
        begin = {"role": "user", "content": [reminder, {"type": "text", "text": "weather ?"}]}
        await send(
            client, 3, begin, said, {"role": "user", "content": [result]}, {"role": "system", "content": "be quick"}
        )
    _, first, second = await stage.calls(attempt)
    assert continues(second, first)


async def test_an_answer_of_a_given_shape(stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    stage.says('{"city": "Paris"}')
    message = await client.messages.parse(model="m", max_tokens=50, messages=[HELLO], output_format=Weather)
    assert message.parsed_output == Weather(city="Paris")
    assert stage.engine.asked[0][1].grammar is not None
    [call] = await stage.calls(attempt)
    assert call.sampling.grammar is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons_arrive(stage: Stage, client: anthropic.AsyncAnthropic, stream: bool) -> None:
    async def ask(**fields: Any) -> tuple[str | None, str | None]:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [HELLO], **fields}
        if stream:
            async with client.messages.stream(**asked) as events:
                message: Message = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
        return message.stop_reason, message.stop_sequence

    stage.says("one two three")
    assert await ask(stop_sequences=["two"]) == ("stop_sequence", "two")
    stage.engine.finish = "length"
    assert await ask() == ("max_tokens", None)


async def test_errors_are_those_of_the_sdk(stage: Stage, attempt: Attempt, client: anthropic.AsyncAnthropic) -> None:
    image: MessageParam = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}
    with pytest.raises(anthropic.BadRequestError, match="not supported") as refused:
        await client.messages.create(model="m", max_tokens=9, messages=[image])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        await client.with_options(api_key="nobody").messages.create(model="m", max_tokens=9, messages=[HELLO])
    assert stranger.value.type == "authentication_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.create(requests=[])
    stage.engine.error = RuntimeError("no power")
    with pytest.raises(anthropic.APIStatusError, match="no power") as broken:
        await client.messages.create(model="m", max_tokens=9, messages=[HELLO])
    assert (broken.value.status_code, broken.value.type) == (503, "overloaded_error")
    with pytest.raises(anthropic.APIStatusError, match="no power"):
        async with client.messages.stream(model="m", max_tokens=9, messages=[HELLO]) as stream:
            await stream.get_final_message()
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete", "incomplete"]
