"""SDK → socket → gateway → tree → engine → store: is history token-exact in all of OpenAI's wire formats?"""

from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response

from lightningrl.engine.base import EngineBusy
from lightningrl.errors import EngineError
from lightningrl.gateway import create_app
from lightningrl.types import Attempt, Call

from .conftest import Stage

QUESTION = "what is the weather ?"
USER: Any = {"role": "user", "content": QUESTION}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
WISH = 'let me look\n<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'


@pytest.fixture
async def attempt(stage: Stage) -> Attempt:
    return await stage.begin()


@pytest.fixture
async def client(stage: Stage, attempt: Attempt) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=attempt.token, max_retries=0) as client:
        yield client


def is_exact(calls: list[Call]) -> None:
    """The prompt of each call begins with the exact ids of the call before: prompt and completion."""
    assert [call.capture for call in calls] == ["rendered"] + ["bridged"] * (len(calls) - 1)
    for parent, call in pairwise(calls):
        exact = [*parent.prompt_ids, *parent.completion_ids]
        assert (call.parent_call_id, call.prompt_ids[: len(exact)].tolist()) == (parent.id, exact)


Back = Callable[[list[Any], Response], dict[str, Any]]


def _by_response(history: list[Any], response: Response) -> dict[str, Any]:
    return {"previous_response_id": response.id, "input": []}


def _by_reference(history: list[Any], response: Response) -> dict[str, Any]:
    return {"input": [*history, *({"type": "item_reference", "id": item.id} for item in response.output)]}


def _in_full(history: list[Any], response: Response) -> dict[str, Any]:
    return {"input": [*history, *(item.to_dict() for item in response.output)]}


def _in_full_without_ids(history: list[Any], response: Response) -> dict[str, Any]:
    kept = [{key: value for key, value in item.to_dict().items() if key != "id"} for item in response.output]
    return {"input": [*history, *kept], "store": False}


async def ask(client: openai.AsyncOpenAI, *, stream: bool, **body: Any) -> Response:
    if not stream:
        return await client.responses.create(model="m", tools=[TOOL], instructions="be brief", **body)
    async with client.responses.stream(model="m", tools=[TOOL], instructions="be brief", **body) as events:
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("back", [_by_response, _by_reference, _in_full, _in_full_without_ids])
async def test_an_agent_on_responses_is_captured_as_one_conversation(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI, back: Back, stream: bool
) -> None:
    stage.says(WISH, "sunny", "you are welcome")
    first = await ask(client, stream=stream, input=QUESTION)
    message, wish = first.output
    assert message.type == "message"
    assert wish.type == "function_call"
    assert (first.output_text, wish.name, wish.arguments) == ("let me look", "weather", '{"city":  "Paris"}')
    again = back([USER], first)
    items = [*again["input"], {"type": "function_call_output", "call_id": wish.call_id, "output": "23 degrees"}]
    second = await ask(client, stream=stream, **{**again, "input": items})
    assert second.output_text == "sunny"
    again = back(items, second)
    third = await ask(
        client, stream=stream, **{**again, "input": [*again["input"], {"role": "user", "content": "thanks"}]}
    )
    assert third.output_text == "you are welcome"
    calls = await stage.calls(attempt)
    is_exact(calls)
    assert [call.id for call in calls] == [first.id, second.id, third.id]
    assert first.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens) == (
        len(calls[0].prompt_ids),
        len(calls[0].completion_ids),
    )
    text = stage.template.decode(calls[2].prompt_ids.tolist())
    assert [text.count(word) for word in ("be brief", QUESTION, "let me look", "23 degrees", "sunny", "thanks")] == [
        1
    ] * 6


async def test_another_gateway_knows_earlier_responses(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI
) -> None:
    stage.says("one", "two")
    first = await client.responses.create(model="m", input=QUESTION)
    second = await client.responses.create(model="m", input="and now ?", previous_response_id=first.id)
    app = create_app(store=stage.store, chat=stage.template, engines={"policy": stage.engine}, seed=7, max_length=2000)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))  # type: ignore[arg-type]
    async with openai.AsyncOpenAI(base_url="http://other/v1", api_key=attempt.token, http_client=http) as other:
        await other.responses.create(model="m", input="still ?", previous_response_id=second.id)
    is_exact(await stage.calls(attempt))


async def test_an_attempt_cannot_refer_to_responses_of_another(stage: Stage, client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="m", input=QUESTION)
    stranger = await stage.begin("stranger")
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=stranger.token, max_retries=0) as other:
        with pytest.raises(openai.BadRequestError, match="not found"):
            await other.responses.create(model="m", input=QUESTION, previous_response_id=response.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(
                model="m", input=[{"type": "item_reference", "id": str(response.output[0].id)}]
            )
    assert await stage.calls(stranger) == []


async def test_input_tokens_are_those_of_the_prompt(stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model="m", input=QUESTION, tools=[TOOL])
    assert stage.engine.asked == []
    await client.responses.create(model="m", input=QUESTION, tools=[TOOL])
    [call] = await stage.calls(attempt)
    assert counted.input_tokens == len(call.prompt_ids)


@pytest.mark.parametrize("wire", ["chat", "responses", "completions"])
async def test_a_stream_that_breaks_raises_in_the_sdk(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI, wire: str
) -> None:
    stage.says("hello word you pick")
    stage.engine.error = EngineError("the engine fell over")
    creates: dict[str, Callable[[], Any]] = {
        "chat": lambda: client.chat.completions.create(model="m", messages=[USER], stream=True),
        "responses": lambda: client.responses.create(model="m", input=QUESTION, stream=True),
        "completions": lambda: client.completions.create(model="m", prompt=QUESTION, stream=True),
    }
    with pytest.raises(openai.APIError, match="the engine fell over"):
        _ = [event async for event in await creates[wire]()]
    [call] = await stage.calls(attempt)
    assert (call.capture, call.dialect) == ("incomplete", f"openai.{wire}")


async def test_a_busy_engine_is_a_rate_limit(stage: Stage, client: openai.AsyncOpenAI) -> None:
    stage.engine.error = EngineBusy("full", retry_after_s=2)
    with pytest.raises(openai.RateLimitError, match="full") as raised:
        await client.responses.create(model="m", input=QUESTION)
    assert raised.value.response.headers["retry-after"] == "2"


async def test_raw_prompts_are_read_unchanged_and_answered_in_their_order(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI
) -> None:
    stage.engine.script = lambda prompt_ids, sampling: prompt_ids[:2]
    ids = stage.template.encode("red green blue")
    texts = ["say a word", "you pick one"]
    answer = await client.completions.create(model="m", prompt=texts, n=2, max_tokens=2)
    heads = [stage.template.decode(stage.template.encode(text)[:2]) for text in texts]
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (place, heads[place // 2]) for place in range(4)
    ]
    answer = await client.completions.create(model="m", prompt=ids, logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    calls = await stage.calls(attempt)
    assert [call.prompt_ids.tolist() for call in calls] == [
        stage.template.encode(text) for text in texts for _ in range(2)
    ] + [ids]
    assert [call.sampling.max_tokens for call in calls] == [2, 2, 2, 2, 16]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_raw_prompt_that_continues_an_answer_is_bridged(
    stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI, echo: bool, stream: bool
) -> None:
    stage.engine.script = lambda prompt_ids, sampling: [5, 6, 7, 5]  # not the canonical tokens of that text
    prompt = "say a word"
    for _ in range(3):
        if stream:
            pieces = [
                piece
                async for piece in await client.completions.create(model="m", prompt=prompt, echo=echo, stream=True)
            ]
            text = "".join(piece.choices[0].text for piece in pieces)
        else:
            text = (await client.completions.create(model="m", prompt=prompt, echo=echo)).choices[0].text
        prompt = (text if echo else prompt + text) + " again"
    is_exact(await stage.calls(attempt))


async def test_legacy_functions_are_bridged(stage: Stage, attempt: Attempt, client: openai.AsyncOpenAI) -> None:
    stage.says(WISH, "sunny")
    functions: Any = [{"name": "weather", "parameters": PARAMETERS}]
    first = await client.chat.completions.create(model="m", messages=[USER], functions=functions)
    wish = first.choices[0].message.function_call
    assert wish is not None
    made: Any = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": wish.name, "arguments": wish.arguments},
    }
    result: Any = {"role": "function", "name": "weather", "content": "23 degrees"}
    second = await client.chat.completions.create(model="m", messages=[USER, made, result], functions=functions)
    assert second.choices[0].message.content == "sunny"
    is_exact(await stage.calls(attempt))


async def test_the_client_of_azure_is_served(stage: Stage, attempt: Attempt) -> None:
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=stage.url, api_key=attempt.token, api_version="2024-10-21"
    ) as client:
        chat = await client.chat.completions.create(model="checker", messages=[USER])
        response = await client.responses.create(model="m", input=QUESTION)
    assert (chat.choices[0].message.content, response.output_text) == ("hello", "hello")
    first, _ = await stage.calls(attempt)
    assert first.agent == "check"
