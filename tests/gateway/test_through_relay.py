"""Agents behind a worker's relay: real SDKs, and the real gateway."""

import asyncio

import aiohttp
import openai
import pytest

from lightningrl.runner.relay import Relay
from tests.runner.network import network

from .conftest import Stage

QUESTION = [{"role": "user", "content": "say a word"}]


async def test_an_sdk_gets_the_same_answer_and_the_same_stream_as_without_a_relay(stage: Stage) -> None:
    attempt = await stage.begin()
    async with Relay(stage.url) as relay:
        relay.begin(attempt.id, attempt.token)
        texts = []
        for url in (stage.url, relay.url):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=attempt.token, max_retries=0) as client:
                whole = await client.chat.completions.create(model="m", messages=QUESTION)  # type: ignore[arg-type]
                events = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)  # type: ignore[arg-type]
                pieces = [event.choices[0].delta.content or "" async for event in events if event.choices]
                texts.append((whole.choices[0].message.content, pieces))
        assert texts[0] == texts[1] and len(texts[0][1]) > 2
        assert relay.end(attempt.id) is None
    assert len(await stage.calls(attempt)) == 4


async def test_an_agent_without_retries_lives_through_a_cut_network(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.delay_s = 0.3
    async with network(stage.url) as between, Relay(between.url) as relay:
        relay.begin(attempt.id, attempt.token)
        async with openai.AsyncOpenAI(base_url=f"{relay.url}/v1", api_key=attempt.token, max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))  # type: ignore[arg-type]
            while not stage.engine.asked:
                await asyncio.sleep(0.005)
            between.cut()
            await asyncio.sleep(0.2)
            between.is_cut = False
            assert (await asking).choices[0].message.content == "hello"
        assert relay.end(attempt.id) is None
    assert len(stage.engine.asked) == len(await stage.calls(attempt)) == 1, "it is sampled once"


async def test_an_agent_that_goes_away_stops_the_sampling(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.delay_s = 60.0
    async with Relay(stage.url) as relay:
        relay.begin(attempt.id, attempt.token)
        async with openai.AsyncOpenAI(base_url=f"{relay.url}/v1", api_key=attempt.token, max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))  # type: ignore[arg-type]
            while not stage.engine.asked:
                await asyncio.sleep(0.005)
            asking.cancel()
            async with asyncio.timeout(60):
                while not stage.engine.cancelled:
                    await asyncio.sleep(0.005)
        assert relay.end(attempt.id) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1beta/models/m:generateContent", "/x"])
async def test_a_refusal_is_passed_on_in_the_dialect_of_its_path(stage: Stage, path: str) -> None:
    async with Relay(stage.url) as relay, aiohttp.ClientSession(headers={"authorization": "Bearer lrl-x"}) as client:
        answers = []
        for url in (stage.url, relay.url):
            async with client.post(f"{url}{path}", json={"model": "m", "messages": QUESTION}) as got:
                answers.append((got.status, dict(got.headers), await got.json()))
        assert answers[0] == answers[1] and answers[0][0] in (401, 404)


async def test_a_websocket_is_refused_as_by_the_gateway(stage: Stage) -> None:
    attempt = await stage.begin()
    async with Relay(stage.url) as relay, aiohttp.ClientSession() as client:
        relay.begin(attempt.id, attempt.token)
        for url in (stage.url, relay.url):
            with pytest.raises(aiohttp.WSServerHandshakeError, match="426"):
                await client.ws_connect(f"{url}/v1/realtime", headers={"x-api-key": attempt.token})
        assert relay.end(attempt.id) is None
