"""What does the gateway keep in memory, and for how long?"""

import asyncio
import gc
from typing import Any

import httpx2
import pytest

from lightningrl.gateway import answering
from lightningrl.gateway.capture import Exchange
from lightningrl.types import Attempt

from .conftest import Stage

BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "say a word"}]}


async def ask(stage: Stage, attempt: Attempt, client: httpx2.AsyncClient) -> None:
    answer = await client.post(f"{stage.url}/v1/chat/completions", json=BODY, headers={"x-api-key": attempt.token})
    assert answer.status_code == 200


async def test_sessions_of_attempts_that_have_ended_are_forgotten(stage: Stage) -> None:
    running = [await stage.begin(f"running{n}") for n in range(5)]
    async with httpx2.AsyncClient() as client:
        for attempt in running:
            await ask(stage, attempt, client)
        for n in range(60):
            attempt = await stage.begin(f"r{n}")
            await ask(stage, attempt, client)
            await stage.store.finish(attempt.id, "succeeded")
        kept = set(stage.gateway.sessions._sessions)
        assert kept >= {attempt.id for attempt in running}
        assert len(kept) <= 2 * (len(running) + 1)
        for attempt in running:
            await ask(stage, attempt, client)
    assert [len(await stage.calls(attempt)) for attempt in running] == [2] * 5


async def test_the_parts_of_a_delivered_answer_are_freed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "WRITTEN_S", 0.0)
    attempt = await stage.begin()
    async with httpx2.AsyncClient() as client:
        for _ in range(20):
            await ask(stage, attempt, client)
    gc.collect()
    assert not [
        thing for thing in gc.get_objects() if type(thing) is Exchange and thing._session.attempt.token == attempt.token
    ]
    [session] = stage.gateway.sessions._sessions.values()
    assert len(session.unread._written) <= 1
    assert session.unread._waiting == {}


async def test_a_rebuilt_session_reuses_the_randomness_of_cancelled_calls(stage: Stage) -> None:
    attempt = await stage.begin()
    async with httpx2.AsyncClient() as client:
        stage.engine.delay_s = 60.0
        with pytest.raises(httpx2.TimeoutException):
            await client.post(
                f"{stage.url}/v1/chat/completions", json=BODY, headers={"x-api-key": attempt.token}, timeout=2.0
            )
        while not await stage.calls(attempt):
            await asyncio.sleep(0.01)
        stage.engine.delay_s = 0.0
        stage.gateway.sessions._sessions.clear()
        await ask(stage, attempt, client)
        await ask(stage, attempt, client)
    seeds = [sampling.seed for _, sampling, _ in stage.engine.asked]
    assert seeds[0] == seeds[1] != seeds[2]
