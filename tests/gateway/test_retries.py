"""An SDK repeats a request that got no answer: is it answered once, and are resamples kept apart?"""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest

from lightningrl.gateway import answering
from lightningrl.types import Attempt

from .conftest import Stage

BODY = {"model": "m", "messages": [{"role": "user", "content": "say a word"}]}
RETRY = {"x-stainless-retry-count": "1"}


async def ask(
    stage: Stage, attempt: Attempt, *, timeout_s: float = 10.0, headers: dict[str, str] | None = None, **more: Any
) -> httpx2.Response:
    """One request on a connection of its own."""
    async with httpx2.AsyncClient(timeout=timeout_s) as client:
        url = f"{stage.url}/v1/chat/completions"
        return await client.post(
            url, json={**BODY, **more}, headers={"authorization": f"Bearer {attempt.token}", **(headers or {})}
        )


def text_of(response: httpx2.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


def streamed_text(response: httpx2.Response) -> str:
    events = [json.loads(line) for line in response.text.split("data: ") if line.startswith("{")]
    assert response.text.endswith("data: [DONE]\n\n")
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def counting(stage: Stage) -> None:
    """Each answer is a different word."""
    words = iter("abcdefgh")
    stage.engine.script = lambda prompt_ids, sampling: [
        *stage.template.encode(next(words)),
        stage.template.turn_end_id or 0,
    ]


async def test_identical_requests_at_the_same_time_are_resamples(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    stage.engine.delay_s = 0.1
    answers = await asyncio.gather(*(ask(stage, attempt) for _ in range(4)))
    assert sorted(map(text_of, answers)) == ["a", "b", "c", "d"]
    assert len(await stage.calls(attempt)) == 4


async def test_a_repetition_joins_the_request_that_is_still_under_way(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    stage.engine.delay_s = 0.3
    first = asyncio.create_task(ask(stage, attempt))
    while not stage.engine.asked:
        await asyncio.sleep(0.005)
    again = await ask(stage, attempt, headers=RETRY)
    assert again.json() == (await first).json()
    assert len(await stage.calls(attempt)) == len(stage.engine.asked) == 1


async def test_a_repetition_gets_its_answer_although_the_first_client_goes_away(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.delay_s = 2.0
    first = asyncio.create_task(ask(stage, attempt, timeout_s=1.0))
    while not stage.engine.asked:
        await asyncio.sleep(0.005)
    again = asyncio.create_task(ask(stage, attempt, headers=RETRY))
    with pytest.raises(httpx2.TimeoutException):
        await first
    assert text_of(await again) == "hello"
    [call] = await stage.calls(attempt)
    assert call.capture == "rendered"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_ready_when_its_client_had_gone_is_given_to_the_repetition(
    stage: Stage, stream: bool
) -> None:
    attempt = await stage.begin()
    counting(stage)
    append = stage.store.append

    async def slow(*records: Any) -> None:  # like a busy disk
        await append(*records)
        await asyncio.sleep(0.4)

    stage.store.append = slow  # type: ignore[method-assign]
    with pytest.raises(httpx2.TimeoutException):
        await ask(stage, attempt, timeout_s=0.2, stream=stream)
    await asyncio.sleep(0.3)
    del stage.store.append  # type: ignore[attr-defined]
    again = await ask(stage, attempt, headers=RETRY, stream=stream)
    [call] = [
        call for call in await stage.calls(attempt) if call.capture != "incomplete"
    ]  # on a slow machine the first call may be
    assert (streamed_text(again) if stream else text_of(again)) == call.response["choices"][0]["message"]["content"]


async def test_a_repetition_of_a_refused_request_is_sampled_afresh(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    stage.engine.error = RuntimeError("boom")
    assert (await ask(stage, attempt)).status_code == 503
    stage.engine.error = None
    stage.engine.delay_s = 0.2
    other = asyncio.create_task(ask(stage, attempt))  # a resample that is being answered meanwhile
    while len(stage.engine.asked) < 2:
        await asyncio.sleep(0.005)
    again = await ask(stage, attempt, headers=RETRY)
    assert text_of(again) != text_of(await other)
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete", "rendered", "rendered"]


async def test_a_repetition_of_a_cancelled_request_does_not_get_the_answer_of_a_resample(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    stage.engine.delay_s = 1.0
    other = asyncio.create_task(ask(stage, attempt))
    while not stage.engine.asked:
        await asyncio.sleep(0.005)
    with pytest.raises(httpx2.TimeoutException):
        await ask(stage, attempt, timeout_s=0.2)
    while not stage.engine.cancelled:
        await asyncio.sleep(0.005)
    again = await ask(stage, attempt, headers=RETRY)
    assert {text_of(again), text_of(await other)} == {"a", "c"}


async def test_a_repetition_of_a_request_refused_with_429_does_not_get_the_answer_of_a_resample(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    stage.gateway._max_in_flight = 2
    stage.engine.delay_s = 1.5  # longer than the SDK waits before it repeats a request
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=8) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**BODY) for _ in range(4)))  # type: ignore[call-overload]
    assert len({answer.id for answer in answers}) == 4
    assert len(await stage.calls(attempt)) == 4


async def test_a_repeated_stream_that_breaks_ends_with_an_error_after_it_was_kept_alive(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await stage.begin()
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.05)
    stage.engine.delay_s = 0.4
    stage.engine.error = RuntimeError("boom")
    first = asyncio.create_task(ask(stage, attempt, stream=True))
    while not stage.engine.asked:
        await asyncio.sleep(0.005)
    for answer in (await ask(stage, attempt, stream=True, headers=RETRY), await first):
        assert (answer.status_code, ": keep-alive" in answer.text) == (200, True)
        assert "boom" in answer.text.split("data: ")[-1]


async def test_a_repetition_of_another_body_is_a_request_of_its_own(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    stage.engine.delay_s = 0.2
    first = asyncio.create_task(ask(stage, attempt))
    while not stage.engine.asked:
        await asyncio.sleep(0.005)
    again = await ask(stage, attempt, headers=RETRY, temperature=0.5)
    assert text_of(again) != text_of(await first)


async def test_a_repeated_stream_is_one_answer(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.says("one two three")
    stage.engine.delay_s = 0.05
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:

        async def talk(headers: dict[str, str]) -> str:
            pieces = await client.chat.completions.create(**BODY, stream=True, extra_headers=headers)  # type: ignore[call-overload]
            return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

        first = asyncio.create_task(talk({}))
        while not stage.engine.asked:
            await asyncio.sleep(0.005)
        assert await asyncio.gather(first, talk(RETRY)) == ["one two three"] * 2
    assert len(await stage.calls(attempt)) == 1


async def test_the_openai_sdk_times_out_retries_and_the_seed_stays_the_same(stage: Stage) -> None:
    attempt = await stage.begin()
    delays = iter([1.0, 0.0])
    seeds: list[int | None] = []

    def script(prompt_ids: list[int], sampling: Any) -> list[int]:
        seeds.append(sampling.seed)
        stage.engine.delay_s = next(delays)
        return [*stage.template.encode("late"), stage.template.turn_end_id or 0]

    stage.engine.script = script
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=1, timeout=0.3) as client:
        answer = await client.chat.completions.create(**BODY)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "late"
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete", "rendered"]
    assert seeds[0] == seeds[1]


async def test_bodies_that_differ_in_bytes_alone_are_different_requests(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.delay_s = 0.1
    compact, spaced = json.dumps(BODY, separators=(",", ":")), json.dumps(BODY)
    async with httpx2.AsyncClient() as client:

        async def post(text: str, headers: dict[str, str]) -> int:
            headers = {"authorization": f"Bearer {attempt.token}", **headers}
            return (await client.post(f"{stage.url}/v1/chat/completions", content=text, headers=headers)).status_code

        first = asyncio.create_task(post(compact, {}))
        while not stage.engine.asked:
            await asyncio.sleep(0.005)
        assert [await post(spaced, RETRY), await first] == [200, 200]
    assert len(stage.engine.asked) == 2


async def test_an_answer_that_was_written_and_not_read_is_given_again(stage: Stage) -> None:
    attempt = await stage.begin()
    counting(stage)
    first = await ask(stage, attempt)
    again = await ask(stage, attempt, headers=RETRY)  # the connection broke meanwhile: the server cannot see it
    assert again.json() == first.json()
    assert len(await stage.calls(attempt)) == 1
    await ask(stage, attempt)  # a resample: now the lost answer could be either
    assert text_of(await ask(stage, attempt, headers=RETRY)) == "c"


async def test_a_repetition_that_comes_late_is_sampled(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stage.begin()
    counting(stage)
    monkeypatch.setattr(answering, "WRITTEN_S", 0.05)
    await ask(stage, attempt)
    await asyncio.sleep(0.1)
    assert text_of(await ask(stage, attempt, headers=RETRY)) == "b"
