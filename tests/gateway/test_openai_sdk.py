"""Does the real OpenAI SDK get what it expects over a real socket, and is every token recorded?"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest

from lightningrl.types import Attempt

from .conftest import Stage

USER: Any = {"role": "user", "content": "what is the weather ?"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture
async def attempt(stage: Stage) -> Attempt:
    return await stage.begin()


@pytest.fixture
async def client(stage: Stage, attempt: Attempt) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=attempt.token, max_retries=0) as client:
        yield client


async def test_an_answer_is_recorded_token_by_token(stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="writer", messages=[USER], temperature=0.5, top_p=0.9, max_tokens=50, stop="x", seed=5
    )
    [call] = await stage.calls(attempt)
    prompt_ids, sampling, policy = stage.engine.asked[0]
    ids = [*stage.template.encode("hello"), stage.template.turn_end_id]
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), len(ids))
    assert (answer.id, answer.model, answer.object) == (call.id, "writer", "chat.completion")
    assert (call.agent, call.policy, call.policy_version, call.capture, call.index) == (
        "writer",
        policy,
        3,
        "rendered",
        0,
    )
    assert (
        call.prompt_ids.tolist()
        == prompt_ids
        == stage.template.encode("<|im_start|>user\nwhat is the weather ?<|im_end|>\n<|im_start|>assistant\n")
    )
    assert call.completion_ids.tolist() == ids
    assert call.logprobs.tolist() == [-0.5] * len(ids)
    assert call.sampling == sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop, sampling.seed) == (
        0.5,
        0.9,
        50,
        ("x",),
        5,
    )
    assert sampling.stop_token_ids == (stage.template.turn_end_id,)
    assert call.response == answer.model_dump(exclude_unset=True)
    assert call.request["messages"] == [USER]


async def test_a_stream_has_the_same_content_and_the_same_record(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI
) -> None:
    stage.says("It is sunny in Paris . äöü €")
    whole = await client.chat.completions.create(model="m", messages=[USER], seed=1)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="m", messages=[USER], seed=1, stream=True, stream_options={"include_usage": True}
        )
    ]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert len(deltas) > 5
    assert deltas[0].delta.role == "assistant"
    assert (
        "".join(choice.delta.content or "" for choice in deltas)
        == whole.choices[0].message.content
        == "It is sunny in Paris . äöü €"
    )
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == ["stop"]
    assert chunks[-1].usage == whole.usage
    one, two = await stage.calls(attempt)
    assert two.response["choices"] == one.response["choices"]
    assert two.completion_ids.tolist() == one.completion_ids.tolist()
    assert {chunk.id for chunk in chunks} == {two.id}


async def test_the_sync_client_works_too(stage: Stage, attempt: Attempt) -> None:
    def talk() -> list[str | None]:
        with openai.OpenAI(base_url=stage.url, api_key=attempt.token) as client:
            whole = client.chat.completions.create(model="m", messages=[USER])
            pieces = client.chat.completions.create(model="m", messages=[USER], stream=True)
            return [whole.choices[0].message.content, "".join(piece.choices[0].delta.content or "" for piece in pieces)]

    assert await asyncio.to_thread(talk) == ["hello", "hello"]
    assert len(await stage.calls(attempt)) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_arrive_byte_for_byte_and_the_next_turn_is_bridged(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI, stream: bool
) -> None:
    stage.says('let me look\n<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>', "sunny")
    if stream:
        async with client.chat.completions.stream(model="m", messages=[USER], tools=[WEATHER]) as events:
            message = (await events.get_final_completion()).choices[0].message
    else:
        answer = await client.chat.completions.create(model="m", messages=[USER], tools=[WEATHER])
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
    assert message.content == "let me look"
    assert message.tool_calls is not None
    [wish] = message.tool_calls
    assert wish.type == "function"
    assert (wish.function.name, wish.function.arguments) == ("weather", '{"city":  "Paris"}')
    # clients drop the text, and write the arguments again
    arguments = json.dumps(json.loads(wish.function.arguments), separators=(",", ":"))
    echoed: Any = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**wish.model_dump(), "function": {"name": "weather", "arguments": arguments}}],
    }
    result: Any = {"role": "tool", "tool_call_id": wish.id, "content": "23 degrees"}
    final = await client.chat.completions.create(model="m", messages=[USER, echoed, result], tools=[WEATHER])
    assert final.choices[0].message.content == "sunny"
    one, two = await stage.calls(attempt)
    assert (one.finish_reason, two.capture, two.parent_call_id) == ("tool_calls", "bridged", one.id)
    exact = [*one.prompt_ids, *one.completion_ids]
    assert two.prompt_ids[: len(exact)].tolist() == exact
    assert "23 degrees" in stage.template.decode(two.prompt_ids[len(exact) :].tolist())


async def test_n_answers_are_n_calls(stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI) -> None:
    stage.engine.script = lambda prompt_ids, sampling: [(sampling.seed or 0) % 50 + 10]
    answer = await client.chat.completions.create(model="m", messages=[USER], n=3, logprobs=True, top_logprobs=2)
    calls = await stage.calls(attempt)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({call.sampling.seed for call in calls}) == 3
    assert {call.prompt_ids.tobytes() for call in calls} == {calls[0].prompt_ids.tobytes()}
    assert [c.message.content for c in answer.choices] == [
        stage.template.decode(call.completion_ids.tolist()) for call in calls
    ]
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.5]
    pieces = [
        piece async for piece in await client.chat.completions.create(model="m", messages=[USER], n=2, stream=True)
    ]
    assert {piece.choices[0].index for piece in pieces} == {0, 1}
    assert len(await stage.calls(attempt)) == 5


async def test_a_stop_string_is_cut_off_but_its_tokens_are_recorded(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI
) -> None:
    ids = stage.template.encode("SELECT name ; DROP")
    stage.engine.script = lambda prompt_ids, sampling: ids
    for stream in (False, True):
        if stream:
            pieces = [
                piece
                async for piece in await client.chat.completions.create(
                    model="m", messages=[USER], stop=[" ; D"], stream=True
                )
            ]
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        else:
            text = (await client.chat.completions.create(model="m", messages=[USER], stop=[" ; D"])).choices[
                0
            ].message.content or ""
        assert text == "SELECT name"
    assert [call.completion_ids.tolist() for call in await stage.calls(attempt)] == [ids, ids]
    # the cut answer is sent back: it is spliced with its stop string, and the turn is closed
    history = [USER, {"role": "assistant", "content": "SELECT name"}, USER]
    await client.chat.completions.create(model="m", messages=history)
    last = (await stage.calls(attempt))[-1]
    first = (await stage.calls(attempt))[0]
    assert last.capture == "bridged"
    assert last.prompt_ids[len(first.prompt_ids) :].tolist()[: len(ids) + 1] == [*ids, stage.template.turn_end_id]


async def test_without_a_seed_randomness_follows_from_run_rollout_prompt_and_occurrence(stage: Stage) -> None:
    async def seeds(rollout_id: str) -> list[int | None]:
        attempt = await stage.begin(rollout_id)
        async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
            for text in ("a", "b", "a"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        found = [call.sampling.seed for call in await stage.calls(attempt)]
        await stage.store.finish(attempt.id, "lost")
        return found

    first = await seeds("r1")
    assert len(set(first)) == 3
    assert await seeds("r1") == first  # the second attempt at the same rollout
    [(_, third)] = await stage.store.claim("w", limit=1, lease_s=60)
    await stage.store.finish(third.id, "failed")
    assert not set(await seeds("r2")) & set(first)


async def test_a_rollouts_seed_overrides_the_agents(stage: Stage) -> None:
    """An agent with `seed=42` in its code would get identical samples for all members of a group."""
    seeds: list[list[int | None]] = []
    for rollout_id, seed in (("a", 1), ("b", 2), ("c", 1)):
        attempt = await stage.begin(rollout_id, seed=seed)
        async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=[USER], seed=42)
        seeds.append([call.sampling.seed for call in await stage.calls(attempt)])
    assert seeds[0] == seeds[2]
    assert len({*seeds[0], *seeds[1]}) == 4


@pytest.mark.parametrize(("asked", "sampled"), [(1e-6, 0.01), (0.01, 0.01), (0.0, 0.0)])
async def test_a_temperature_that_vllm_would_raise_is_raised_before_it_is_recorded(
    stage: Stage, asked: float, sampled: float
) -> None:
    attempt = await stage.begin()
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
        await client.chat.completions.create(model="m", messages=[USER], temperature=asked)
    [call] = await stage.calls(attempt)
    assert stage.engine.asked[0][1].temperature == call.sampling.temperature == sampled


async def test_the_rollouts_sampling_settings_override_the_agents_and_length_has_a_default(stage: Stage) -> None:
    attempt = await stage.begin("greedy", temperature=0.0, stop=["q"])
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
        await client.chat.completions.create(model="m", messages=[USER], temperature=0.8, stop=["x"])
        await client.chat.completions.create(model="m", messages=[USER], max_completion_tokens=10**6)
    prompt, sampling, _ = stage.engine.asked[0]
    assert (sampling.temperature, sampling.stop) == (0.0, ("q",))
    assert [asked.max_tokens for _, asked, _ in stage.engine.asked] == [2000 - len(prompt)] * 2


async def test_models_and_health(stage: Stage, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["checker", "policy"]
    async with openai.AsyncOpenAI(base_url=stage.url, api_key="x") as bare:
        assert (await bare.get("/health", cast_to=object)) == {"status": "ok"}


async def test_routes_decide_policy_and_role(stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="checker", messages=[USER])
    await client.chat.completions.create(model="writer", messages=[USER])
    assert [(call.agent, call.policy) for call in await stage.calls(attempt)] == [
        ("check", "frozen"),
        ("writer", "policy"),
    ]
    assert [policy for _, _, policy in stage.engine.asked] == ["frozen", "policy"]


async def test_content_parts_developer_role_and_unknown_fields_are_understood(
    stage: Stage, client: openai.AsyncOpenAI
) -> None:
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "the weather ?"}]
    messages: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    await client.chat.completions.create(
        model="m", messages=messages, extra_body={"new_field": {"deep": [1]}, "top_k": -1}, user="me", stop=["", "x"]
    )
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    text = f"{system}<|im_start|>user\nwhat is the weather ?<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids, sampling, _ = stage.engine.asked[0]
    assert prompt_ids == stage.template.encode(text)
    assert (sampling.top_k, sampling.stop) == (0, ("x",))


async def test_every_sampled_token_is_recorded_whatever_it_is(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI
) -> None:
    random = np.random.default_rng(0)
    said: list[list[int]] = []

    def script(prompt_ids: list[int], sampling: object) -> list[int]:
        said.append(random.integers(0, 290, size=random.integers(1, 20)).tolist())
        return said[-1]

    stage.engine.script = script
    messages: list[Any] = [USER]
    for turn in range(12):
        if turn % 2:
            pieces = [
                piece async for piece in await client.chat.completions.create(model="m", messages=messages, stream=True)
            ]
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        else:
            text = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, USER]
    calls = await stage.calls(attempt)
    assert [call.completion_ids.tolist() for call in calls] == said
    assert any(stage.template.encode(stage.template.decode(ids)) != ids for ids in said)  # not canonical
    for parent, call in itertools.pairwise(calls):
        exact = [*parent.prompt_ids, *parent.completion_ids]
        assert (call.capture, call.parent_call_id) == ("bridged", parent.id)
        assert call.prompt_ids[: len(exact)].tolist() == exact
    assert [asked for asked, _, _ in stage.engine.asked] == [call.prompt_ids.tolist() for call in calls]


async def test_after_a_turn_of_the_assistant_a_new_turn_is_sampled_unless_the_request_continues_it(
    stage: Stage, client: openai.AsyncOpenAI
) -> None:
    said: Any = {"role": "assistant", "content": "it is"}
    for last, more in ((said, {}), (said, {"continue_final_message": True}), ({**said, "prefix": True}, {})):
        messages: list[Any] = [USER, last]
        await client.chat.completions.create(model="m", messages=messages, extra_body=more)
    await client.responses.create(model="m", input=[USER, said])
    ends = [
        stage.template.decode(prompt_ids, control=True).rpartition("weather ?<|im_end|>\n")[2]
        for prompt_ids, _, _ in stage.engine.asked
    ]
    opened, goes_on = "<|im_start|>assistant\nit is<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>assistant\nit is"
    assert ends == [opened, goes_on, goes_on, opened]
