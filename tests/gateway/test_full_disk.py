"""A full disk is not the client's fault: SDKs and exporters are told to repeat their requests."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.gateway import create_app
from lightningrl.store.sqlite import SQLiteStore

from .conftest import ScriptedEngine, Stage, serving
from .test_traces import attribute, sent

PLENTY = 2**30
"""Pages."""


@pytest.fixture
async def on_disk(template: ChatTemplate, tmp_path: Path) -> AsyncIterator[Stage]:
    store, engine = await SQLiteStore.open(tmp_path / "store.sqlite"), ScriptedEngine(lambda prompt_ids, sampling: ())
    gateway = create_app(store=store, chat=template, engines={"policy": engine}, max_length=200_000, may_reward=True)
    async with serving(gateway) as url:
        stage = Stage(store=store, template=template, engine=engine, gateway=gateway, url=url)
        stage.says("hello")
        yield stage
    await store.close()


async def limit_to(store: SQLiteStore, pages: int) -> None:
    """Limit the database to this many pages; None: to the pages in use."""
    await store._writer.run(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchone())


def noise(size: int) -> str:
    """Text that does not compress."""
    return random.Random(size).randbytes(size // 2).hex()


async def until_refused(client: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> httpx2.Response:
    """Store records until the last page is full."""
    for _ in range(300):
        answer = await client.post(path, json=body)
        if answer.status_code != 200:
            return answer
    raise AssertionError("the disk is not full")


async def test_a_full_disk_is_the_servers_failure(on_disk: Stage, caplog: pytest.LogCaptureFixture) -> None:
    attempt = await on_disk.begin()
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": noise(20_000)}]}
    small = {**chat, "messages": [{"role": "user", "content": "hi"}]}
    traces = sent(attribute("session", noise(30_000)))
    async with httpx2.AsyncClient(base_url=on_disk.url, headers={"x-api-key": attempt.token}) as client:
        first = await client.post("/v1/chat/completions", json=small)
        reward = {"value": 1.0, "name": "n" * 190, "call": first.json()["id"]}
        await limit_to(on_disk.store, 1)
        for path, body in (("/v1/chat/completions", chat), ("/v1/rewards", reward)):
            refused = await until_refused(client, path, body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (500, "store_error"), error
            assert "disk" in error["message"]
        streamed = (await client.post("/v1/chat/completions", json={**chat, "stream": True})).text
        assert '"store_error"' in streamed and "[DONE]" not in streamed
        exported = await client.post("/v1/traces", json=traces)
        assert (exported.status_code, exported.json()["code"]) == (503, 14)
        stored = len(await on_disk.calls(attempt))

        await limit_to(on_disk.store, PLENTY)
        for path, body in (("/v1/chat/completions", chat), ("/v1/rewards", reward), ("/v1/traces", traces)):
            assert (await client.post(path, json=body)).status_code == 200
    assert len(await on_disk.calls(attempt)) == stored + 1
    assert len(await on_disk.store.spans([attempt.id])) == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_answer_that_could_not_be_stored_is_sampled_again_with_its_randomness(on_disk: Stage) -> None:
    attempt = await on_disk.begin()
    small: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    large = {**small, "messages": [{"role": "user", "content": noise(20_000)}]}
    async with httpx2.AsyncClient(base_url=on_disk.url, headers={"x-api-key": attempt.token}) as client:
        await client.post("/v1/chat/completions", json=small)
        await limit_to(on_disk.store, 1)
        stored = len(on_disk.engine.asked)
        await until_refused(client, "/v1/chat/completions", large)
        failed = on_disk.engine.asked[-1][1].seed
        assert failed not in {sampling.seed for _, sampling, _ in on_disk.engine.asked[stored - 1 : -1]}
        await limit_to(on_disk.store, PLENTY)
        assert (await client.post("/v1/chat/completions", json=large)).status_code == 200
    assert on_disk.engine.asked[-1][1].seed == failed


async def test_a_reward_for_a_call_of_another_attempt_is_still_the_agents_mistake(on_disk: Stage) -> None:
    attempt = await on_disk.begin()
    async with httpx2.AsyncClient(base_url=on_disk.url, headers={"x-api-key": attempt.token}) as client:
        answer = await client.post("/v1/rewards", json={"value": 1.0, "call": "chatcmpl-other.1-0"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "call")
