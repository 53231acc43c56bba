"""Limits of an attempt: calls, sampled tokens, and bytes of its requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from lightningrl.engine.base import EngineBusy
from lightningrl.gateway import create_app, server
from lightningrl.gateway.limits import Limits
from lightningrl.types import Attempt

from .conftest import Stage, serving

USER: Any = {"role": "user", "content": "say a word"}
ASK = {"model": "m", "messages": [USER]}


@asynccontextmanager
async def limited(stage: Stage, **limits: int) -> AsyncIterator[str]:
    """A new gateway before the same store. Yields its URL."""
    app = create_app(
        store=stage.store,
        chat=stage.template,
        engines={"policy": stage.engine},
        max_length=2000,
        limits=Limits(**limits),
        may_reward=True,
    )
    async with serving(app) as url:
        yield url


async def ask(url: str, attempt: Attempt, *, path: str = "/chat/completions", **more: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(verify=False) as client:
        headers = {"authorization": f"Bearer {attempt.token}"}
        return await client.post(f"{url}{path}", json={**ASK, **more}, headers=headers)


def reached(answer: httpx2.Response, said: str) -> bool:
    assert said in answer.text
    error = answer.json()["error"]
    return (answer.status_code, error["code"], answer.headers["x-should-retry"]) == (403, "limit_reached", "false")


async def test_calls_are_counted_also_those_at_the_same_time_and_over_a_restart(stage: Stage) -> None:
    attempt, other = await stage.begin(), await stage.begin("r2")
    stage.engine.delay_s = 0.1
    async with limited(stage, calls=5) as url:
        answers = await asyncio.gather(*(ask(url, attempt) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        too_many = await ask(url, attempt, n=3)
        assert reached(too_many, "`3` of its `5` calls are used, and this request wants `3`; hint: the recipe sets")
        answers = await asyncio.gather(*(ask(url, attempt) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 403, 403]
        assert (await ask(url, other)).status_code == 200
    async with limited(stage, calls=5) as url:
        assert reached(await ask(url, attempt), "`5` of its `5` calls")
    assert len(await stage.calls(attempt)) == 5
    assert (await stage.store.attempts(["r"]))[0].status == "running"


async def test_sampled_tokens_are_counted_also_over_a_restart(stage: Stage) -> None:
    attempt = await stage.begin()
    async with limited(stage, tokens=1) as url:
        assert (await ask(url, attempt)).json()["choices"][0]["message"]["content"] == "hello"  # it is complete
        assert reached(await ask(url, attempt), "tokens have been sampled of `1`; hint: the recipe sets `agent.max_tok")
    async with limited(stage, tokens=1) as url:
        assert reached(await ask(url, attempt), "tokens have been sampled of `1`")


async def test_tokens_of_an_answer_that_broke_count(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.says("one two three four five six seven")
    async with limited(stage, tokens=3) as url, httpx2.AsyncClient(verify=False) as client:
        stage.engine.delay_s = 0.02
        headers = {"authorization": f"Bearer {attempt.token}"}
        body = {**ASK, "stream": True}
        async with client.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as answer:
            pieces = answer.aiter_bytes()
            for _ in range(5):
                await anext(pieces)
        while not stage.engine.cancelled:
            await asyncio.sleep(0.005)
        [call] = await stage.calls(attempt)
        assert call.capture == "incomplete" and len(call.completion_ids) >= 3
        assert reached(await ask(url, attempt), "tokens have been sampled of `3`")


async def test_bytes_are_counted_of_every_request(stage: Stage) -> None:
    attempt = await stage.begin()
    long = [{"role": "user", "content": "x" * 300}]
    async with limited(stage, bytes=1000) as url:
        assert (await ask(url, attempt, messages=long)).status_code == 200
        assert (await ask(url, attempt, path="/rewards", value=1, call=None, messages=long)).status_code == 200
        assert (await ask(url, attempt)).status_code == 200
        for path in ("/chat/completions", "/rewards", "/embeddings", "/messages/count_tokens"):
            answer = await ask(url, attempt, path=path, value=1, messages=long)
            assert answer.status_code == 403
            assert "its requests have more than `1000` bytes; hint: the recipe sets `agent.max_bytes`" in answer.text
    async with limited(stage, bytes=100) as url:  # after a restart: what is recorded
        assert reached(await ask(url, attempt), "more than `100` bytes")


async def test_without_limits_nothing_is_refused(stage: Stage) -> None:
    attempt = await stage.begin()
    async with limited(stage) as url:
        for _ in range(3):
            assert (await ask(url, attempt)).status_code == 200


async def test_requests_that_get_no_answer_use_up_no_calls(stage: Stage) -> None:
    attempt = await stage.begin()
    async with limited(stage, calls=1) as url:
        stage.engine.error = EngineBusy("all slots are taken", retry_after_s=1)
        assert [(await ask(url, attempt)).status_code for _ in range(3)] == [429] * 3
        stage.engine.error = None
        assert (await ask(url, attempt, messages=[])).status_code == 400
        assert (await ask(url, attempt)).status_code == 200


async def test_a_request_that_comes_again_is_answered_beyond_the_limit(stage: Stage) -> None:
    attempt = await stage.begin()
    headers = {"authorization": f"Bearer {attempt.token}", "x-lightningrl-request": "a"}
    for _ in range(2):
        async with limited(stage, calls=1, tokens=1, bytes=200) as url, httpx2.AsyncClient(verify=False) as client:
            answers = [await client.post(f"{url}/chat/completions", json=ASK, headers=headers) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert reached(await ask(url, attempt), "limit")


async def test_sdks_raise_their_own_error_and_do_not_repeat(stage: Stage) -> None:
    attempt = await stage.begin()
    async with limited(stage, calls=1) as url:
        await ask(url, attempt)
        async with openai.AsyncOpenAI(base_url=url, api_key=attempt.token) as client:
            with pytest.raises(openai.PermissionDeniedError, match=r"`agent\.max_calls`"):
                await client.chat.completions.create(model="m", messages=[USER])
        async with anthropic.AsyncAnthropic(base_url=url, api_key=attempt.token) as client:
            with pytest.raises(anthropic.PermissionDeniedError, match=r"`agent\.max_calls`"):
                await client.messages.create(model="m", max_tokens=5, messages=[USER])
        gemini = await ask(url, attempt, path="/models/m:generateContent", contents="hi")
        assert (gemini.status_code, gemini.json()["error"]["status"]) == (403, "PERMISSION_DENIED")


async def test_the_bytes_of_a_request_count_once_also_over_a_restart(stage: Stage) -> None:
    attempt, named = await stage.begin(), await stage.begin("r2")
    async with limited(stage, bytes=1000) as url, httpx2.AsyncClient(verify=False) as client:
        headers = {"authorization": f"Bearer {named.token}", "x-lightningrl-request": "a"}
        body = {**ASK, "n": 4, "messages": [{"role": "user", "content": "x" * 100}]}
        assert (await client.post(f"{url}/chat/completions", json=body, headers=headers)).status_code == 200
        for _ in range(2):
            assert (await ask(url, attempt, n=4, messages=body["messages"])).status_code == 200
    assert len(await stage.calls(attempt)) == 8
    async with limited(stage, bytes=450) as url:
        assert (await ask(url, attempt)).status_code == 200
        assert reached(await ask(url, attempt, messages=body["messages"]), "more than `450` bytes")
        assert (await ask(url, named, messages=body["messages"])).status_code == 200


async def test_a_named_request_that_broke_pays_its_bytes_once(stage: Stage) -> None:
    attempt = await stage.begin()
    headers = {"authorization": f"Bearer {attempt.token}", "x-lightningrl-request": "a"}
    async with limited(stage, bytes=100) as url, httpx2.AsyncClient(verify=False) as client:
        for stage.engine.error in (EngineBusy("all slots are taken", retry_after_s=1), None):
            answer = await client.post(f"{url}/chat/completions", json=ASK, headers=headers)
            assert answer.status_code == (200 if stage.engine.error is None else 429)
        assert reached(await ask(url, attempt), "more than `100` bytes")


async def test_an_answer_that_a_restart_cut_short_is_free(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ENDING_S", 1)
    attempt = await stage.begin()
    headers = {"authorization": f"Bearer {attempt.token}", "x-lightningrl-request": "a"}
    async with httpx2.AsyncClient(verify=False, timeout=20) as client:
        stage.engine.delay_s = 0.3
        stage.says("one two three four five six seven eight nine ten eleven twelve")
        async with limited(stage, calls=1, tokens=2, bytes=100) as url:
            body = {**ASK, "stream": True}
            waiting = asyncio.create_task(client.post(f"{url}/chat/completions", json=body, headers=headers))
            await asyncio.sleep(1.0)
        with pytest.raises(httpx2.TransportError):
            await waiting
        [cut] = await stage.calls(attempt)
        assert cut.capture == "incomplete" and len(cut.completion_ids) >= 2
        stage.engine.delay_s = 0.0
        async with limited(stage, calls=1, tokens=2, bytes=100) as url:
            answer = await client.post(f"{url}/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert reached(await ask(url, attempt), "limit")
