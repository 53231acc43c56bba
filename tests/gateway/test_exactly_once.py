"""A named request that is sent again: is it sampled once, and is its answer the same, whatever broke meanwhile?"""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.gateway import Route, answering, create_app, server
from lightningrl.gateway.app import Gateway
from lightningrl.gateway.upstream import Upstream
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Rollout, Task

from .conftest import ScriptedEngine, Stage, serving

NAME = "x-lightningrl-request"
TURNS = [{"role": "user", "content": "say a word"}]
LOST = (httpx2.TransportError, TimeoutError)


@dataclass(frozen=True)
class Way:
    """One way to ask."""

    path: str
    body: dict[str, Any]
    choices: int = 1

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream")) or ":stream" in self.path


CHAT = Way("/v1/chat/completions", {"model": "m", "messages": TURNS})
WAYS = {
    "chat": CHAT,
    "chat, n=2": Way(CHAT.path, {**CHAT.body, "n": 2}, choices=2),
    "chat, logprobs": Way(CHAT.path, {**CHAT.body, "logprobs": True, "top_logprobs": 2}),
    "completions": Way("/v1/completions", {"model": "m", "prompt": ["a b", "c"], "n": 2}, choices=4),
    "responses": Way("/v1/responses", {"model": "m", "input": "say a word"}),
    "anthropic": Way("/v1/messages", {"model": "m", "max_tokens": 30, "messages": TURNS}),
    "gemini": Way("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "say a word"}]}]}),
}
WAYS |= {
    f"{name}, stream": Way(way.path, {**way.body, "stream": True}, way.choices)
    for name, way in WAYS.items()
    if name != "gemini"
}
WAYS["gemini, stream"] = Way("/v1beta/models/m:streamGenerateContent?alt=sse", WAYS["gemini"].body)
WAYS["gemini, array"] = Way("/v1beta/models/m:streamGenerateContent", WAYS["gemini"].body)


@dataclass
class House:
    """A server that dies and is started again, over one store file."""

    path: Path
    template: ChatTemplate
    engine: ScriptedEngine
    upstreams: list[Upstream] = field(default_factory=list)
    url: str = ""
    _parts: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        self.store = await SQLiteStore.open(self.path)
        routes = [Route(model="far", policy="upstreams.far")] if self.upstreams else []
        self.gateway: Gateway = create_app(
            store=self.store,
            chat=self.template,
            engines={"policy": self.engine},
            routes=[*routes, Route()],
            upstreams=self.upstreams,
            seed=7,
            max_length=100_000,
        )
        self.url = await self._parts.enter_async_context(serving(self.gateway))

    async def die(self) -> None:
        """What the server has not stored yet is lost."""
        await self.store.close()
        await self._parts.aclose()

    async def stop(self) -> None:
        await self._parts.aclose()
        await self.store.close()

    async def begin(self, rollout_id: str = "r") -> Attempt:
        task = Task(id="t", input={}, split="train")
        await self.store.enqueue([Rollout(id=rollout_id, group_id="g", task=task)])
        [(_, attempt)] = await self.store.claim("w", limit=1, lease_s=60)
        return attempt

    async def ask(
        self, way: Way, attempt: Attempt, name: str, *, timeout_s: float = 10.0, retries: int = 0
    ) -> httpx2.Response:
        """Send a request once, on a connection of its own. `retries`: as an agent's SDK counts them."""
        async with httpx2.AsyncClient(timeout=30, verify=False) as client, asyncio.timeout(timeout_s):
            keys = {"authorization": f"Bearer {attempt.token}", NAME: name, "x-stainless-retry-count": str(retries)}
            return await client.post(f"{self.url}{way.path}", json=way.body, headers=keys)

    async def complete(self, attempt: Attempt, name: str) -> list[Call]:
        """The complete calls of a request."""
        calls = await self.store.calls([attempt.id])
        return [call for call in calls if call.request_id == name and call.capture != "incomplete"]


@pytest.fixture
async def house(tmp_path: Path, template: ChatTemplate) -> AsyncIterator[House]:
    house = House(tmp_path / "store.sqlite", template, ScriptedEngine(lambda prompt_ids, sampling: ()))
    counting(house)
    await house.start()
    yield house
    await house.die()


def counting(house: House | Stage) -> None:
    """No two answers are the same."""
    numbers = iter(range(10**6))
    template = house.template
    house.engine.script = lambda ids, sampling: [
        *template.encode(f"answer {next(numbers)} is here"),
        template.turn_end_id or 0,
    ]


def shown(way: Way, response: httpx2.Response) -> Any:
    """All that an agent reads: the body, or what its SDK makes of a stream."""
    assert response.status_code == 200, response.text
    if not way.streams:
        return response.json()
    kind = response.headers["content-type"]
    if kind == "application/json":
        return _accumulated(response.json())
    assert kind == "text/event-stream"
    assert response.text.endswith("data: [DONE]\n\n") or way.path[4:] not in ("chat/completions", "completions")
    return _accumulated([json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")])


def _accumulated(events: list[Any]) -> tuple[dict[str, str], Any]:
    """(texts by choice or item, the last event)"""
    texts: dict[str, str] = {}

    def add(key: object, text: str | None) -> None:
        texts[str(key)] = texts.get(str(key), "") + (text or "")

    for event in events:
        for choice in event.get("choices", ()):
            add(choice["index"], choice.get("text") or choice.get("delta", {}).get("content"))
            for token in (choice.get("logprobs") or {}).get("content") or ():
                add("tokens", f"{token['token']} {token['logprob']} ")
        for candidate in event.get("candidates", ()):
            add(candidate["index"], "".join(part.get("text", "") for part in candidate["content"]["parts"]))
        delta = event.get("delta")
        if isinstance(delta, str):
            add(event["output_index"], delta)
        elif delta is not None:
            add(event.get("index"), delta.get("text"))
    last = {key: value for key, value in events[-1].items() if key != "sequence_number"}
    return texts, last


async def until_answered(house: House, way: Way, attempt: Attempt, name: str, chance: random.Random) -> httpx2.Response:
    """As a relay does: send the request again until it is answered. Most connections break at some moment."""
    while True:
        timeout_s = 10.0 if chance.random() < 0.3 else chance.uniform(0.0, 0.08)
        with suppress(*LOST):
            response = await house.ask(way, attempt, name, timeout_s=timeout_s)
            if response.status_code == 200 and '"error":{' not in response.text:
                return response
        await asyncio.sleep(chance.uniform(0.0, 0.02))


@pytest.mark.parametrize("kind", WAYS)
async def test_an_answer_that_was_given_is_given_again_by_another_server(house: House, kind: str) -> None:
    way = WAYS[kind]
    attempt = await house.begin()
    told = await house.ask(way, attempt, "a")
    await house.die()
    await house.start()
    again = await house.ask(way, attempt, "a")
    assert shown(way, again) == shown(way, told)
    if not way.streams:
        assert again.content == told.content
    other = await house.ask(way, attempt, "b")
    assert shown(way, other) != shown(way, told)
    assert [len(await house.complete(attempt, name)) for name in "ab"] == [way.choices] * 2
    assert len(house.engine.asked) == 2 * way.choices


@pytest.mark.parametrize(
    "kind", ["chat, n=2, stream", "completions", "responses, stream", "anthropic", "gemini, array"]
)
async def test_whatever_breaks_each_request_is_recorded_once(house: House, kind: str) -> None:
    way, chance = WAYS[kind], random.Random(kind)
    house.engine.delay_s = 0.004
    attempt = await house.begin()

    async def destroy() -> None:
        for _ in range(3):
            await asyncio.sleep(chance.uniform(0.02, 0.12))
            await house.die()
            await house.start()

    names = [f"request-{number}" for number in range(4)]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(until_answered(house, way, attempt, name, chance) for name in names)), destroy()
    )
    seen: list[Any] = []
    for name, answer in zip(names, answers, strict=True):
        calls = await house.complete(attempt, name)
        assert len(calls) == way.choices
        assert shown(way, await house.ask(way, attempt, name)) == shown(way, answer)
        for call in calls:
            text = house.template.decode(call.completion_ids.tolist()[:-1])
            assert text in str(shown(way, answer))
            seen.append(text)
    assert len(set(seen)) == len(names) * way.choices  # no answer was given to two requests
    assert len({call.id for name in names for call in await house.complete(attempt, name)}) == len(seen)


async def test_a_broken_connection_does_not_stop_the_sampling_of_a_named_request(house: House) -> None:
    attempt = await house.begin()
    house.engine.delay_s = 4.0
    for name in ("", "a"):
        with pytest.raises(TimeoutError):
            await house.ask(CHAT, attempt, name, timeout_s=1.0)
    answer = await house.ask(CHAT, attempt, "a")
    assert [call.capture for call in await house.store.calls([attempt.id])] == ["incomplete", "rendered"]
    assert house.engine.cancelled == 1
    assert answer.json()["id"] == (await house.complete(attempt, "a"))[0].id


async def test_an_answer_that_nobody_fetched_waits(house: House) -> None:
    attempt = await house.begin()
    house.engine.delay_s = 0.3
    with pytest.raises(TimeoutError):
        await house.ask(CHAT, attempt, "a", timeout_s=0.15)
    while not await house.complete(attempt, "a"):
        await asyncio.sleep(0.02)
    answer = await house.ask(CHAT, attempt, "a")
    assert answer.status_code == 200
    assert len(house.engine.asked) == 1


async def test_a_request_that_comes_twice_at_once_is_sampled_once(house: House) -> None:
    attempt = await house.begin()
    house.engine.delay_s = 0.1
    long = Way(CHAT.path, {**CHAT.body, "messages": [{"role": "user", "content": "word " * 11_000}]})
    answers = await asyncio.gather(*(house.ask(long, attempt, "a") for _ in range(5)))
    assert len({answer.content for answer in answers}) == 1
    assert len(house.engine.asked) == 1


async def abandon(house: House, attempt: Attempt, name: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(verify=False) as client:
        headers = {"x-api-key": attempt.token}
        return await client.post(f"{house.url}/abandon", json={"request": name}, headers=headers)


async def test_an_abandoned_request_is_given_up_and_its_randomness_is_free(house: House) -> None:
    attempt = await house.begin()
    house.engine.delay_s = 60.0
    with pytest.raises(TimeoutError):
        await house.ask(CHAT, attempt, "a", timeout_s=2.0)
    assert (await abandon(house, attempt, "a")).json() == {"request": "a"}
    assert house.engine.cancelled == 1
    [given_up] = await house.store.calls([attempt.id])
    assert (given_up.capture, given_up.finish_reason) == ("incomplete", "cancelled")
    house.engine.delay_s = 0.0
    late = await house.ask(CHAT, attempt, "a")
    assert (late.status_code, late.json()["error"]["code"]) == (410, "abandoned")
    await house.ask(CHAT, attempt, "b", retries=1)
    [call] = await house.complete(attempt, "b")
    assert call.sampling.seed == given_up.sampling.seed


async def test_a_request_that_is_abandoned_while_its_client_waits_ends(house: House) -> None:
    attempt = await house.begin()
    house.engine.delay_s = 5.0
    waiting = asyncio.create_task(house.ask(CHAT, attempt, "a"))
    while not house.engine.asked:
        await asyncio.sleep(0.005)
    await abandon(house, attempt, "a")
    answer = await waiting
    assert (answer.status_code, answer.headers["x-should-retry"]) == (410, "false")


async def test_a_request_that_is_abandoned_before_it_is_sampled_leaves_its_randomness(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await house.begin()
    make = house.gateway.prompts.of

    async def slow(*arguments: Any) -> Any:
        prompts = await make(*arguments)
        await abandon(house, attempt, "a")
        return prompts

    monkeypatch.setattr(house.gateway.prompts, "of", slow)
    assert (await house.ask(CHAT, attempt, "a")).status_code == 410
    monkeypatch.undo()
    await house.ask(CHAT, attempt, "b")
    [call] = await house.complete(attempt, "b")
    [session] = house.gateway.sessions._sessions.values()
    assert call.index == 0
    assert list(session._seen.values()) == [1]  # one answer to this prompt


@pytest.mark.parametrize("name", ["", 3, None, "x" * 65])
async def test_a_name_that_is_none_cannot_be_abandoned(house: House, name: Any) -> None:
    answer = await abandon(house, await house.begin(), name)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request")


async def test_an_agent_that_repeats_its_request_joins_the_answer_of_the_first(house: House) -> None:
    attempt = await house.begin()
    house.engine.delay_s = 0.3
    first = asyncio.create_task(house.ask(CHAT, attempt, "a"))
    while not house.engine.asked:
        await asyncio.sleep(0.005)
    again = asyncio.create_task(house.ask(CHAT, attempt, "b", retries=1))
    await asyncio.sleep(0.1)
    await abandon(house, attempt, "a")  # the agent had closed its first connection
    assert (await again).status_code == 200
    assert (await first).status_code == 410
    assert len(await house.store.calls([attempt.id])) == 1


async def test_a_name_stands_for_one_kind_of_request(house: House) -> None:
    attempt = await house.begin()
    await house.ask(CHAT, attempt, "a")
    answer = await house.ask(WAYS["anthropic"], attempt, "a")
    assert (answer.status_code, answer.json()["error"]["details"]["error_code"]) == (409, "request_id_reused")


async def test_two_attempts_may_use_one_name(house: House) -> None:
    first, second = await house.begin("r1"), await house.begin("r2")
    answers = [await house.ask(CHAT, attempt, "a") for attempt in (first, second)]
    assert len({answer.content for answer in answers}) == 2


async def test_a_request_that_broke_in_the_engine_is_sampled_afresh(house: House) -> None:
    attempt = await house.begin()
    house.engine.error = RuntimeError("boom")
    assert (await house.ask(CHAT, attempt, "a")).status_code == 503
    house.engine.error = None
    assert (await house.ask(CHAT, attempt, "a")).status_code == 200
    assert len(await house.complete(attempt, "a")) == 1


async def test_an_answer_that_was_lost_with_the_server_gets_its_own_randomness_again(house: House) -> None:
    attempt = await house.begin()
    await house.ask(CHAT, attempt, "a")
    house.engine.delay_s = 0.5
    slow = asyncio.create_task(house.ask(CHAT, attempt, "b"))
    while len(house.engine.asked) < 2:
        await asyncio.sleep(0.005)
    house.engine.delay_s = 0.0
    await house.ask(CHAT, attempt, "c")
    await house.die()
    with suppress(*LOST):
        await slow
    await house.start()
    for name in ("b", "d"):
        await house.ask(CHAT, attempt, name)
    seeds = [call.sampling.seed for name in "abcd" for call in await house.complete(attempt, name)]
    assert len(set(seeds)) == 4
    assert [sampling.seed for _, sampling, _ in house.engine.asked] == [*seeds[:3], seeds[1], seeds[3]]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_shuts_down_breaks_off_so_that_the_next_one_answers(
    house: House, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(server, "ENDING_S", 1)
    await house.stop()
    await house.start()
    attempt = await house.begin()
    house.engine.delay_s = 0.3 if stream else 5.0
    way = Way(CHAT.path, {**CHAT.body, "stream": stream})
    waiting = asyncio.create_task(house.ask(way, attempt, "a"))
    await asyncio.sleep(0.5)  # a part of the stream has been sent
    await house.stop()
    with pytest.raises(LOST):
        await waiting
    await house.start()
    assert [call.capture for call in await house.store.calls([attempt.id])] == ["incomplete"]
    house.engine.delay_s = 0.0
    assert (await house.ask(way, attempt, "a")).status_code == 200
    [given_up, call] = await house.store.calls([attempt.id])
    assert call.sampling.seed == given_up.sampling.seed


async def test_an_answer_in_the_making_is_given_up_when_its_attempt_ends(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await house.begin()
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.05)
    house.engine.delay_s = 30.0
    with pytest.raises(TimeoutError):
        await house.ask(CHAT, attempt, "a", timeout_s=0.2)
    waiting = asyncio.create_task(house.ask(CHAT, attempt, "b"))
    while len(house.engine.asked) < 2:
        await asyncio.sleep(0.005)
    await house.store.finish(attempt.id, "failed")
    answer = await waiting
    assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")
    while house.engine.cancelled < 2:
        await asyncio.sleep(0.005)
    assert await house.store.calls([attempt.id]) == []


@asynccontextmanager
async def far(house: House, body: bytes, kind: bytes) -> AsyncIterator[list[bytes]]:
    """Let a slow upstream answer for the model `far`. Yields the requests that it gets."""
    asked: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((await receive())["body"])
        await asyncio.sleep(0.1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for place in range(0, len(body), 7):
            await send({"type": "http.response.body", "body": body[place : place + 7], "more_body": True})
            await asyncio.sleep(0.002)
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as url:
        house.upstreams = [Upstream("far", url=url)]
        await house.die()
        await house.start()
        yield asked
        await house.upstreams[0].close()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_of_an_upstream_is_given_again(house: House, stream: bool) -> None:
    event = b'{"id":"x","choices":[{"index":0,"delta":{"content":"\xc3\xa4"}}]}'
    body = b"data: " + event + b"\n\ndata: [DONE]\n\n" if stream else b'{"id": "x", "choices": []}'
    attempt = await house.begin()
    way = Way(CHAT.path, {**CHAT.body, "model": "far", "stream": stream})
    async with far(house, body, b"text/event-stream" if stream else b"application/json") as asked:
        with pytest.raises(TimeoutError):
            await house.ask(way, attempt, "a", timeout_s=0.05)
        answers = [await house.ask(way, attempt, "a")]
        await house.die()
        await house.start()
        answers.append(await house.ask(way, attempt, "a"))
        assert len(asked) == 1
        assert NAME.encode() not in asked[0]
    for answer in answers:
        assert answer.content == body if stream else answer.json() == json.loads(body)
    assert len(await house.complete(attempt, "a")) == 1
