"""A call that breaks is recorded as incomplete, refused in the dialect's own shape, and never trained."""

import asyncio
import json
import time
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from lightningrl.engine.base import Unanswerable
from lightningrl.errors import EngineError, LightningError, UserError
from lightningrl.gateway import Route, create_app, server
from lightningrl.gateway.scripted import ScriptedEngine

from .conftest import Stage, serving

USER: Any = {"role": "user", "content": "say a word"}


async def post(
    stage: Stage, body: bytes | dict[str, Any], token: str, path: str = "/v1/chat/completions"
) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx2.AsyncClient() as client:
        return await client.post(stage.url + path, content=content, headers={"authorization": f"Bearer {token}"})


BAD_BODIES: list[bytes | dict[str, Any]] = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"{",
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "m", "temperature": NaN, "messages": []}',
    b'{"model": "m", "temperature": 1e999, "messages": []}',
    b"[" * 100_000 + b"]" * 100_000,
    {},
    {"model": "m"},
    {"model": "m", "messages": []},
    {"model": "m", "messages": "hi"},
    {"model": 1, "messages": [USER]},
    {"model": "m", "messages": [{"content": "x"}]},
    {"model": "m", "messages": [{"role": "user", "content": 1}]},
    {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"model": "m", "messages": [USER], "temperature": -1},
    {"model": "m", "messages": [USER], "temperature": "hot"},
    {"model": "m", "messages": [USER], "top_p": 0},
    {"model": "m", "messages": [USER], "max_tokens": 0},
    {"model": "m", "messages": [USER], "n": 0},
    {"model": "m", "messages": [USER], "n": 1000},
    {"model": "m", "messages": [USER], "tools": [{"type": "function"}]},
    {"model": "m", "messages": [USER], "stop": [1]},
    {"model": "m", "messages": [{"role": "user", "content": "word " * 3000}]},
]


async def test_a_bad_body_gets_400_in_the_dialects_shape(stage: Stage) -> None:
    attempt = await stage.begin()
    for body in BAD_BODIES:
        response = await post(stage, body, attempt.token)
        assert response.status_code == 400, (str(body)[:200], response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert stage.engine.asked == []
    assert await stage.calls(attempt) == []


async def test_an_error_names_the_invalid_field(stage: Stage) -> None:
    attempt = await stage.begin()
    error = (await post(stage, {"model": "m", "messages": [{"role": "user", "content": 1}]}, attempt.token)).json()[
        "error"
    ]
    assert error["param"] == "messages"


async def test_an_unknown_path_gets_404(stage: Stage) -> None:
    attempt = await stage.begin()
    assert (await post(stage, {}, attempt.token, "/v1/nothing")).status_code == 404
    async with httpx2.AsyncClient() as client:
        assert (await client.get(f"{stage.url}/v1/chat/completions")).status_code == 405


async def test_a_model_without_a_route_is_not_found(stage: Stage) -> None:
    stage_app = create_app(
        store=stage.store,
        chat=stage.template,
        engines={"policy": stage.engine},
        routes=[Route(model="only")],
        seed=0,
        max_length=100,
        dialects=["openai.chat"],
    )
    attempt = await stage.begin()
    transport = httpx2.ASGITransport(app=stage_app)  # type: ignore[arg-type]
    async with openai.AsyncOpenAI(
        base_url="http://x", api_key=attempt.token, http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        with pytest.raises(openai.NotFoundError, match="no route for model `m`"):
            await client.chat.completions.create(model="m", messages=[USER])


def test_a_route_to_a_policy_without_an_engine_is_refused(stage: Stage) -> None:
    with pytest.raises(LightningError, match="no engine for policy `other`"):
        create_app(
            store=stage.store,
            chat=stage.template,
            engines={"policy": stage.engine},
            routes=[Route(policy="other")],
            max_length=9,
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (EngineError("the engine is full", hint="wait"), "the engine is full; hint: wait"),
        (RuntimeError("boom"), "the engine raised `RuntimeError`: boom"),
        ("nan", "the engine gave a logprob that is not finite"),
        ("silent", "the engine ended without saying why"),
        ("error", "the engine ended with `error`"),
    ],
    ids=["full", "bug", "nan", "silent", "error"],
)
async def test_a_broken_answer_is_an_error_and_an_incomplete_call(
    stage: Stage, trouble: Exception | str, said: str, stream: bool
) -> None:
    attempt = await stage.begin()
    if isinstance(trouble, Exception):
        stage.engine.error = trouble
    elif trouble == "nan":
        stage.engine.logprob = float("nan")
    else:
        stage.engine.finish = None if trouble == "silent" else "error"  # type: ignore[assignment]
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        with pytest.raises(openai.APIError) as raised:
            if stream:
                stage.says("hello word you pick")
                create = client.chat.completions.create
                stream_of = await create(model="m", messages=[USER], stream=True)
                _ = [piece async for piece in stream_of]
            else:
                await client.chat.completions.create(model="m", messages=[USER])
    assert said in raised.value.message
    [call] = await stage.calls(attempt)
    assert (call.capture, call.finish_reason) == ("incomplete", "error")
    assert call.capture_reason is not None and call.capture_reason in said
    if stream and isinstance(trouble, Exception):
        assert call.completion_ids.tolist() == stage.template.encode(
            "hello word you pick"
        )  # without the end of the turn
    # the conversation continues as if the broken call had not happened
    stage.engine.error, stage.engine.logprob, stage.engine.finish = None, -0.5, "stop"
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
        await client.chat.completions.create(model="m", messages=[USER])
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete", "rendered"]


async def test_a_request_that_the_engine_cannot_serve_gets_400_and_is_not_repeated(stage: Stage) -> None:
    attempt = await stage.begin()
    for error in (Unanswerable("no grammars here", hint="ask for none"), UserError("not installed")):
        stage.engine.error = error
        async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
            with pytest.raises(openai.BadRequestError, match=error.message):
                await client.chat.completions.create(model="m", messages=[USER])
    assert len(stage.engine.asked) == 2
    assert [(call.capture, call.capture_reason) for call in await stage.calls(attempt)] == [
        ("incomplete", "no grammars here"),
        ("incomplete", "not installed"),
    ]


async def test_sdks_do_not_repeat_a_request_whose_script_raised(stage: Stage) -> None:
    def script(prompt: str, messages: list[Any], tools: list[Any]) -> str:
        asked.append(prompt)
        raise ValueError("no luck today")

    asked: list[str] = []
    attempt, engine = await stage.begin(), ScriptedEngine(script, stage.template)
    app = create_app(store=stage.store, chat=stage.template, engines={"policy": engine}, max_length=2000)
    async with serving(app) as url, openai.AsyncOpenAI(base_url=url, api_key=attempt.token) as client:
        with pytest.raises(openai.InternalServerError, match="no luck today"):
            await client.chat.completions.create(model="m", messages=[USER])
    assert len(asked) == 1
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_generation_within_a_second(stage: Stage, stream: bool) -> None:
    attempt = await stage.begin()
    stage.says("hello " * 300)
    stage.engine.delay_s = 0.01 if stream else 100.0
    client = openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0)
    if stream:
        pieces = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        async for _ in pieces:
            break
        await pieces.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(model="m", messages=[USER])
    await client.close()
    left = time.monotonic()
    while not (stage.engine.cancelled and await stage.calls(attempt)):
        assert time.monotonic() - left < 1.0
        await asyncio.sleep(0.01)
    [call] = await stage.calls(attempt)
    assert (call.capture, call.finish_reason, call.capture_reason) == (
        "incomplete",
        "cancelled",
        "the client went away",
    )
    assert (len(call.completion_ids) > 0) == stream
    assert stage.engine.cancelled == 1


async def test_answers_that_were_ready_when_the_client_left_are_incomplete_too(stage: Stage) -> None:
    attempt = await stage.begin()
    lengths = iter([1, 200])
    stage.engine.script = lambda prompt_ids, sampling: [5] * next(lengths)
    stage.engine.delay_s = 0.01
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        pieces = await client.chat.completions.create(model="m", messages=[USER], n=2, stream=True)
        received = 0
        async for _ in pieces:
            received += 1
            if received > 8:
                break
        await pieces.close()
    while len(await stage.calls(attempt)) < 2:
        await asyncio.sleep(0.01)
    assert [call.capture for call in await stage.calls(attempt)] == ["incomplete"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_cut_off_by_the_servers_shutdown_is_recorded_and_gets_an_error(
    stage: Stage, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "ENDING_S", 1)
    attempt = await stage.begin()
    stage.says("hello " * 300)
    stage.engine.delay_s = 0.02 if stream else 5.0  # delay before each piece
    append = stage.store.append

    async def slow(*records: Any) -> None:  # like a busy disk
        await asyncio.sleep(0.3)
        await append(*records)

    stage.store.append = slow  # type: ignore[method-assign]
    async with httpx2.AsyncClient() as client, serving(stage.gateway) as url:
        body, headers = {"model": "m", "messages": [USER], "stream": stream}, {"x-api-key": attempt.token}
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body, headers=headers))
        while not stage.engine.asked:
            await asyncio.sleep(0.01)
    answer = await asking
    [call] = await stage.calls(attempt)
    assert (call.capture, call.capture_reason, call.finish_reason) == ("incomplete", "the run has ended", "cancelled")
    assert len(call.completion_ids) > 10 or not stream
    assert answer.status_code == (200 if stream else 503) and "the run has ended" in answer.text
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_reported_in_the_dialects_shape_also_within_a_stream(
    stage: Stage, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = await stage.begin()

    async def append(*records: Any) -> None:
        raise ValueError("a bug")

    stage.store.append = append  # type: ignore[method-assign]
    answer = await post(stage, {"model": "m", "messages": [USER], "stream": stream}, attempt.token)
    assert answer.status_code == (200 if stream else 500)
    last = answer.text.removesuffix("\n\n").split("data: ")[-1]
    assert json.loads(last)["error"]["message"] == "ValueError: a bug"
    assert [record.message for record in caplog.records] == ["a call failed"]


async def test_one_broken_answer_of_several_breaks_the_request(stage: Stage) -> None:
    attempt = await stage.begin()
    turn = iter([[5], [6, 7], [8]])

    def script(prompt_ids: list[int], sampling: object) -> list[int]:
        ids = next(turn)
        if len(ids) == 2:
            raise RuntimeError("boom")
        return ids

    stage.engine.script = script
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="boom"):
            await client.chat.completions.create(model="m", messages=[USER], n=3)  # type: ignore[list-item]
    calls = await stage.calls(attempt)
    assert [call.capture for call in calls] == ["incomplete"] * 3
    assert [call.completion_ids.tolist() for call in calls] == [[5], [], [8]]


async def test_a_restarted_gateway_continues_where_the_last_one_stopped(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.says('<tool_call>{"name": "f", "arguments": {"a":  1}}</tool_call>')
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    messages: list[Any] = [USER]

    async def turn(transport: httpx2.AsyncBaseTransport | None) -> None:
        http = httpx2.AsyncClient(transport=transport) if transport else None
        async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, http_client=http) as client:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
            message = answer.choices[0].message
            assert message.tool_calls
            messages.extend(
                [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}]
            )

    await turn(None)
    await turn(None)
    app = create_app(
        store=stage.store,
        chat=stage.template,
        engines={"policy": stage.engine},
        routes=[Route()],
        seed=7,
        max_length=2000,
    )
    await turn(httpx2.ASGITransport(app=app))  # type: ignore[arg-type]
    calls = await stage.calls(attempt)
    assert [(call.index, call.capture, call.parent_call_id) for call in calls] == [
        (0, "rendered", None),
        (1, "bridged", calls[0].id),
        (2, "bridged", calls[1].id),
    ]
    # the repeated prompt counts as another occurrence, for the second gateway, too
    messages[:] = [USER]
    await turn(httpx2.ASGITransport(app=app))  # type: ignore[arg-type]
    again = (await stage.calls(attempt))[3]
    assert again.prompt_ids.tolist() == calls[0].prompt_ids.tolist()
    assert again.sampling.seed != calls[0].sampling.seed


async def test_a_thousand_random_bodies_never_get_5xx(stage: Stage) -> None:
    import random

    chance = random.Random(0)
    attempt = await stage.begin()
    scraps = [
        None,
        True,
        -1,
        0,
        1,
        10**30,
        0.5,
        "",
        "m",
        "user",
        "tool",
        "assistant",
        "\u0000é🦊",
        [],
        {},
        [USER],
        [None],
        USER,
        {"name": "f"},
    ]
    keys = [
        "model",
        "messages",
        "tools",
        "n",
        "stop",
        "seed",
        "stream",
        "temperature",
        "max_tokens",
        "logprobs",
        "tool_choice",
        "stream_options",
    ]

    def body() -> bytes:
        tree: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for key in chance.sample(keys, 2):
            tree[key] = chance.choice(scraps)
        message = {
            key: chance.choice(scraps)
            for key in chance.sample(["role", "content", "tool_calls", "tool_call_id", "name"], 2)
        }
        if chance.random() < 0.5:
            tree["messages"] = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
        raw = bytearray(msgspec.json.encode(tree))
        if chance.random() < 0.3:
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        return bytes(raw)

    headers = {"authorization": f"Bearer {attempt.token}"}
    statuses: set[int] = set()
    async with httpx2.AsyncClient() as client:
        for _ in range(1000):
            response = await client.post(f"{stage.url}/v1/chat/completions", content=body(), headers=headers)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400), response.text
    assert statuses == {200, 400}
