"""Can an attempt that is over, or another server's, still do anything?"""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from lightningrl.gateway import create_app
from lightningrl.gateway.upstream import Upstream
from lightningrl.types import Attempt, Rollout, Task

from .conftest import Stage, serving

USER = {"role": "user", "content": "say a word"}
ASK = {"model": "m", "messages": [USER]}
DEEDS = {
    "/chat/completions": ASK,
    "/responses": {"model": "m", "input": "hi"},
    "/messages": {"model": "m", "max_tokens": 5, "messages": [USER]},
    "/messages/count_tokens": {"model": "m", "messages": [USER]},
    "/models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/rewards": {"value": 1.0},
    "/embeddings": {"model": "e", "input": "x"},
    "/abandon": {"request": "a"},
}


async def post(url: str, path: str, attempt: Attempt, body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(verify=False) as client:
        return await client.post(f"{url}{path}", json=body, headers={"authorization": f"Bearer {attempt.token}"})


async def lose(stage: Stage) -> None:
    """As the server does with the attempts of a worker that says that it holds none."""
    await stage.store.claim("w", limit=0, lease_s=60, holding=())


@pytest.mark.parametrize("status", ["lost", "succeeded", "failed", "timeout"])
async def test_what_is_over_can_do_nothing(stage: Stage, status: Any) -> None:
    attempt = await stage.begin()
    await post(stage.url, "/chat/completions", attempt, ASK)
    if status == "lost":
        await lose(stage)
    else:
        await stage.store.finish(attempt.id, status)
    for path, body in DEEDS.items():
        answer = await post(stage.url, path, attempt, body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false"), path
        assert "the attempt of this token has ended" in answer.text
    assert len(await stage.calls(attempt)) == len(stage.engine.asked) == 1
    assert [reward.value for reward in await stage.store.rewards([attempt.id])] == []


async def test_an_answer_in_the_making_is_neither_delivered_nor_recorded_when_its_attempt_is_lost(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.delay_s = 0.02
    whole = asyncio.create_task(post(stage.url, "/chat/completions", attempt, ASK))
    streamed = asyncio.create_task(post(stage.url, "/chat/completions", attempt, {**ASK, "stream": True}))
    while len(stage.engine.asked) < 2:
        await asyncio.sleep(0.002)
    await lose(stage)
    assert (await whole).status_code == 401
    text = (await streamed).text
    assert "attempt_ended" in text and "[DONE]" not in text and '"finish_reason":"stop"' not in text
    assert await stage.calls(attempt) == []


async def test_embeddings_in_the_making_are_not_delivered_when_their_attempt_is_lost(stage: Stage) -> None:
    asked = asyncio.Event()

    async def far(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await asyncio.sleep(0.2)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps({"data": []}).encode()})

    attempt = await stage.begin()
    async with serving(far) as url:
        upstream = Upstream("far", url=url)
        app = create_app(
            store=stage.store,
            chat=stage.template,
            engines={"policy": stage.engine},
            upstreams=[upstream],
            embeddings="upstreams.far",
            max_length=2000,
        )
        async with serving(app) as ours:
            asking = asyncio.create_task(post(ours, "/embeddings", attempt, DEEDS["/embeddings"]))
            await asked.wait()
            await lose(stage)
            assert (await asking).status_code == 401
        await upstream.close()


@pytest.mark.parametrize(("gateway", "status"), [("", 200), ("here", 200), ("there", 421)])
async def test_a_server_answers_its_own_attempts_alone(stage: Stage, gateway: str, status: int) -> None:
    task = Task(id="t", input={}, split="train")
    await stage.store.enqueue([Rollout(id="r", group_id="g", task=task)])
    [(_, attempt)] = await stage.store.claim("w", limit=1, lease_s=60, gateway=gateway)
    app = create_app(
        store=stage.store, chat=stage.template, engines={"policy": stage.engine}, max_length=2000, name="here"
    )
    async with serving(app) as url:
        for path in ("/chat/completions", "/messages", "/abandon"):
            answer = await post(url, path, attempt, DEEDS[path])
            assert answer.status_code == status
            if status == 421:
                assert answer.headers["x-should-retry"] == "false"
                assert "the server `there` answers this attempt; hint: use the base URL" in answer.text
    assert len(stage.engine.asked) == (0 if status == 421 else 2)
