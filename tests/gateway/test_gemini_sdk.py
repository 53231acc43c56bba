"""Does Google's SDK work over a real socket, and is each of its calls recorded and linked token by token?"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pydantic
import pytest
from google import genai
from google.genai import errors, types

from lightningrl.types import Attempt, Call

from .conftest import Stage

pytestmark = pytest.mark.filterwarnings(
    "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"
)  # the SDK's own

ASKED = "what is the weather ?"
WISH = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'


def weather(city: str) -> str:
    """Look out of the window."""
    return f"23 degrees in {city}"


def opened(stage: Stage, token: str, **options: Any) -> genai.Client:
    retry = types.HttpRetryOptions(attempts=1)
    return genai.Client(
        api_key=token, http_options=types.HttpOptions(base_url=stage.url, retry_options=retry), **options
    )


@pytest.fixture
async def attempt(stage: Stage) -> Attempt:
    return await stage.begin()


@pytest.fixture
async def client(stage: Stage, attempt: Attempt) -> AsyncIterator[genai.client.AsyncClient]:
    async with opened(stage, attempt.token).aio as client:
        yield client


def continues(call: Call, parent: Call) -> bool:
    """The chain of calls is exact to the token."""
    said = np.concatenate((parent.prompt_ids, parent.completion_ids))
    return (
        call.capture == "bridged"
        and call.parent_call_id == parent.id
        and call.prompt_ids[: len(said)].tolist() == said.tolist()
    )


async def test_an_answer_is_recorded_token_by_token(
    stage: Stage, attempt: Attempt, client: genai.client.AsyncClient
) -> None:
    config = types.GenerateContentConfig(
        system_instruction="be brief",
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        max_output_tokens=50,
        stop_sequences=["x"],
        seed=5,
    )
    response = await client.models.generate_content(model="writer", contents=ASKED, config=config)
    [call] = await stage.calls(attempt)
    _, sampling, _ = stage.engine.asked[0]
    assert response.text == "hello"
    assert response.candidates is not None
    assert response.candidates[0].finish_reason == types.FinishReason.STOP
    usage = response.usage_metadata
    assert usage is not None
    assert (usage.prompt_token_count, usage.candidates_token_count) == (len(call.prompt_ids), len(call.completion_ids))
    text = f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    assert call.prompt_ids.tolist() == stage.template.encode(text)
    assert (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.max_tokens,
        sampling.stop,
        sampling.seed,
    ) == (0.5, 0.9, 40, 50, ("x",), 5)
    assert (response.response_id, response.model_version, call.dialect, call.capture) == (
        call.id,
        "writer",
        "google.gemini",
        "rendered",
    )


async def test_a_stream_has_the_same_answer_and_record(
    stage: Stage, attempt: Attempt, client: genai.client.AsyncClient
) -> None:
    stage.says("It is sunny in Paris . äöü €")
    whole = await client.models.generate_content(model="m", contents=ASKED)
    chunks = [chunk async for chunk in await client.models.generate_content_stream(model="m", contents=ASKED)]
    assert len(chunks) > 5
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text == "It is sunny in Paris . äöü €"
    assert chunks[-1].usage_metadata == whole.usage_metadata
    one, two = await stage.calls(attempt)
    assert two.completion_ids.tolist() == one.completion_ids.tolist()
    assert two.response["candidates"] == one.response["candidates"]
    assert {chunk.response_id for chunk in chunks} == {two.id}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_bridged_turn_by_turn(
    stage: Stage, attempt: Attempt, client: genai.client.AsyncClient, stream: bool
) -> None:
    """The SDK's chats keep each streamed piece as its own content."""
    stage.says("one two three", "four", "five")
    chat = client.chats.create(model="m")
    for text in ("count", "go on", "more"):
        if stream:
            async for _ in await chat.send_message_stream(text):
                pass
        else:
            await chat.send_message(text)
    first, second, third = await stage.calls(attempt)
    assert continues(second, first)
    assert continues(third, second)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_automatic_function_calling(
    stage: Stage, attempt: Attempt, client: genai.client.AsyncClient, stream: bool
) -> None:
    stage.says(f"let me look\n{WISH}\n{WISH.replace('Paris', 'Rome')}", "warm in both", "bye")
    chat = client.chats.create(model="m", config=types.GenerateContentConfig(tools=[weather]))
    if stream:
        said = "".join(
            [part.text or "" async for chunk in await chat.send_message_stream(ASKED) for part in chunk.parts or []]
        )
        assert said == "let me lookwarm in both"
    else:
        assert (await chat.send_message(ASKED)).text == "warm in both"
    await chat.send_message("thanks")
    first, second, third = await stage.calls(attempt)
    assert "23 degrees in Rome" in json.dumps(second.request)
    assert continues(second, first)
    assert continues(third, second)


async def test_the_sync_client_works_too(stage: Stage, attempt: Attempt) -> None:
    def talk() -> list[str | None]:
        with opened(stage, attempt.token) as client:
            config = types.GenerateContentConfig(tools=[weather])
            said = [client.chats.create(model="m", config=config).send_message(ASKED).text]
            said.append(
                "".join(
                    chunk.text or ""
                    for chunk in client.models.generate_content_stream(model="models/m", contents=["hi"])
                )
            )
            return said

    stage.says(WISH, "sunny")
    assert await asyncio.to_thread(talk) == ["sunny", "sunny"]
    first, second, _ = await stage.calls(attempt)
    assert continues(second, first)


async def test_clients_of_vertex_work_too(stage: Stage, attempt: Attempt) -> None:
    async with opened(stage, attempt.token, enterprise=True).aio as client:
        assert (await client.models.generate_content(model="gemini-3-flash", contents=ASKED)).text == "hello"
        assert (await client.models.count_tokens(model="gemini-3-flash", contents=ASKED)).total_tokens
    [call] = await stage.calls(attempt)
    assert call.request["model"] == "gemini-3-flash"


@pytest.mark.parametrize("ids", ["kept", "dropped", "made up"])
async def test_calls_are_bridged_also_without_their_ids(
    stage: Stage, attempt: Attempt, client: genai.client.AsyncClient, ids: str
) -> None:
    stage.says(f"let me look\n{WISH}", "sunny")
    declared = types.FunctionDeclaration.from_callable(client=client._api_client, callable=weather)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
    response = await client.models.generate_content(model="m", contents=ASKED, config=config)
    text, part = response.parts or []
    assert part.function_call is not None
    call_id = {"kept": part.function_call.id, "dropped": None, "made up": "0f8fad5b"}[ids]
    signature = None if ids == "dropped" else part.thought_signature
    call = types.FunctionCall(id=call_id, name="weather", args=part.function_call.args)
    said = types.Content(role="model", parts=[text, types.Part(function_call=call, thought_signature=signature)])
    result = types.FunctionResponse(id=call_id, name="weather", response={"output": "23"})
    history = [types.UserContent(ASKED), said, types.Content(role="user", parts=[types.Part(function_response=result)])]
    await client.models.generate_content(model="m", contents=history, config=config)
    first, second = await stage.calls(attempt)
    assert continues(second, first)


async def test_the_token_count_is_that_of_the_recorded_prompt(stage: Stage, client: genai.client.AsyncClient) -> None:
    counted = await client.models.count_tokens(model="m", contents=[ASKED, "please"])
    usage = (await client.models.generate_content(model="m", contents=[ASKED, "please"])).usage_metadata
    assert usage is not None
    assert counted.total_tokens == usage.prompt_token_count


async def test_an_answer_of_a_given_shape(stage: Stage, client: genai.client.AsyncClient) -> None:
    class Weather(pydantic.BaseModel):
        city: str
        degrees: int | None = None

    stage.says('{"city": "Paris"}')
    by_type = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Weather)
    by_schema = types.GenerateContentConfig(
        response_mime_type="application/json", response_json_schema=Weather.model_json_schema()
    )
    for config in (by_type, by_schema):
        response = await client.models.generate_content(model="m", contents=ASKED, config=config)
        assert response.parsed in (Weather(city="Paris"), {"city": "Paris"})
        assert stage.engine.asked[-1][1].grammar is not None


async def test_several_candidates_with_logprobs(
    stage: Stage, attempt: Attempt, client: genai.client.AsyncClient
) -> None:
    config = types.GenerateContentConfig(candidate_count=2, response_logprobs=True)
    response = await client.models.generate_content(model="m", contents=ASKED, config=config)
    calls = await stage.calls(attempt)
    assert response.candidates is not None
    assert len(calls) == len(response.candidates) == 2
    for candidate, call in zip(response.candidates, calls, strict=True):
        assert candidate.logprobs_result is not None
        chosen = candidate.logprobs_result.chosen_candidates or []
        assert [token.log_probability for token in chosen] == call.logprobs.tolist()


async def test_errors_are_those_of_the_sdk(stage: Stage, attempt: Attempt, client: genai.client.AsyncClient) -> None:
    image = types.Part.from_bytes(data=b"x", mime_type="image/png")
    with pytest.raises(errors.ClientError, match="not supported") as refused:
        await client.models.generate_content(model="m", contents=[image])
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    async with opened(stage, "nobody").aio as stranger:
        with pytest.raises(errors.ClientError) as unknown:
            await stranger.models.generate_content(model="m", contents=ASKED)
    assert (unknown.value.code, unknown.value.status) == (401, "UNAUTHENTICATED")
    stage.engine.error = RuntimeError("no power")
    with pytest.raises(errors.ServerError, match="no power") as broken:
        await client.models.generate_content(model="m", contents=ASKED)
    assert (broken.value.code, broken.value.status) == (503, "UNAVAILABLE")
    with pytest.raises(errors.ServerError, match="no power"):
        async for _ in await client.models.generate_content_stream(model="m", contents=ASKED):
            pass
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete", "incomplete"]
