"""Limits: too many requests, too large ones, silent streams, upgrades, and unknown paths."""

import asyncio
import gzip
import json
import socket
import zlib
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from lightningrl.engine.base import EngineBusy
from lightningrl.gateway import answering, http
from lightningrl.gateway.body import NESTING_LIMIT

from .conftest import Stage

USER: Any = {"role": "user", "content": "say a word"}


async def test_too_many_requests_get_429_and_the_sdk_repeats_them(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.gateway._max_in_flight = 2
    stage.engine.delay_s = 0.3
    async with httpx2.AsyncClient() as client:
        body, headers = {"model": "m", "messages": [USER]}, {"authorization": f"Bearer {attempt.token}"}
        answers = await asyncio.gather(
            *(client.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers) for _ in range(5))
        )
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "too_busy"
    assert stage.gateway.refusals == {"429 too_busy": 3}
    stage.engine.delay_s = 0.01
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=5) as client:
        asking = [client.chat.completions.create(model="m", messages=[USER]) for _ in range(4)]
        assert [answer.choices[0].message.content for answer in await asyncio.gather(*asking)] == ["hello"] * 4


async def test_a_busy_engine_is_429_and_leaves_no_record(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.engine.error = EngineBusy("all slots are taken", retry_after_s=3)
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        with pytest.raises(anthropic.RateLimitError) as raised:
            await client.messages.create(model="m", max_tokens=5, messages=[USER])
    assert raised.value.response.headers["retry-after"] == "3"
    assert await stage.calls(attempt) == []
    stage.engine.error = None
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
        await client.chat.completions.create(model="m", messages=[USER])
    seeds = [sampling.seed for _, sampling, _ in stage.engine.asked]
    assert seeds[0] == seeds[1]  # the refused request gave its randomness back


async def test_a_silent_stream_is_kept_alive(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stage.begin()
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.1)
    stage.engine.delay_s = 2.0
    body, headers = {"model": "m", "messages": [USER], "stream": True}, {"authorization": f"Bearer {attempt.token}"}
    async with httpx2.AsyncClient() as client:
        text = (await client.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)).text
    assert text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as sdk:
        pieces = await sdk.chat.completions.create(model="m", messages=[USER], stream=True)
        assert "".join([piece.choices[0].delta.content or "" async for piece in pieces]) == "hello"


async def test_bodies_headers_and_nesting_have_limits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stage.begin()
    key = {"authorization": f"Bearer {attempt.token}"}
    monkeypatch.setattr(http, "BODY_LIMIT", 100_000)
    fit = {"model": "m", "messages": [USER]}
    deep: Any = {}
    for _ in range(NESTING_LIMIT):
        deep = {"a": [deep]}
    async with httpx2.AsyncClient() as client:

        async def post(body: Any, headers: dict[str, str]) -> tuple[int, str]:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post(f"{stage.url}/v1/chat/completions", content=content, headers={**key, **headers})
            return answer.status_code, answer.json().get("error", {}).get("code", "")

        assert await post({**fit, "x": "y" * 200_000}, {}) == (413, "too_large")
        assert await post(fit, {"x-large": "y" * http.HEADER_LIMIT}) == (431, "too_large")
        assert await post({**fit, "x": deep}, {}) == (400, "invalid_json")
        assert await post(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {}) == (413, "too_large")
        assert await post(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, {}) == (400, "invalid_json")
        assert (await post(fit, {}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": [USER]}, ("stop",)),
        ("/v1/completions", {"model": "m", "prompt": "x"}, ("stop",)),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [USER]}, ("stop_sequences",)),
        (
            "/v1beta/models/m:generateContent",
            {"contents": [{"parts": [{"text": "x"}]}]},
            ("generationConfig", "stopSequences"),
        ),
    ],
)
async def test_stop_strings_have_limits(stage: Stage, path: str, body: dict[str, Any], place: tuple[str, ...]) -> None:
    attempt = await stage.begin()
    async with httpx2.AsyncClient(base_url=stage.url, headers={"x-api-key": attempt.token}) as client:

        async def post(stops: Any) -> int:
            more = {place[-1]: stops} if len(place) == 1 else {place[0]: {place[-1]: stops}}
            return (await client.post(path, json={**body, **more})).status_code

        assert await post([f"stop {n}" for n in range(64)]) == 200
        assert await post([f"stop {n}" for n in range(65)]) == 400
        assert await post(["x" * 1001]) == 400


async def test_a_websocket_is_refused_with_426(stage: Stage) -> None:
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = ["GET /v1/responses HTTP/1.1", f"Host: {host}", "Connection: Upgrade", "Upgrade: websocket"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", ""]
    writer.write("\r\n".join(lines).encode())
    assert b" 426 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_offers_http2_is_answered_in_http1(stage: Stage) -> None:
    attempt = await stage.begin()
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "m", "messages": [USER]})
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Connection: Upgrade, HTTP2-Settings",
        f"Content-Length: {len(body)}",
        f"Host: {host}",
    ]
    lines += [
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        "Upgrade: h2c",
        f"x-api-key: {attempt.token}",
        "",
        body,
    ]
    writer.write("\r\n".join(lines).encode())
    assert b" 200 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_an_answer_is_complete_if_the_connection_is_closed_after_it(stage: Stage, connection: bytes) -> None:
    attempt, loop = await stage.begin(), asyncio.get_running_loop()
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    host, port = stage.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.setblocking(False)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer %b\r\n"
        head += b"connection: %b\r\ncontent-length: %d\r\n\r\n"
        await loop.sock_sendall(sock, head % (attempt.token.encode(), connection, len(body)) + body)
        async with asyncio.timeout(5.0):
            answer = await loop.sock_recv(sock, 65536)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "hello"
            if connection == b"close":
                assert await loop.sock_recv(sock, 65536) == b""


async def test_a_body_may_be_compressed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stage.begin()
    monkeypatch.setattr(http, "BODY_LIMIT", 100_000)
    plain = json.dumps({"model": "m", "messages": [USER]}).encode()
    huge = gzip.compress(b'{"x": "' + b"y" * 100_000 + b'"}')
    async with httpx2.AsyncClient(headers={"x-api-key": attempt.token}) as client:

        async def post(body: bytes, encoding: str) -> tuple[int, str | None]:
            answer = await client.post(
                f"{stage.url}/v1/chat/completions", content=body, headers={"content-encoding": encoding}
            )
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert await post(gzip.compress(plain), "gzip") == (200, None)
        assert await post(zlib.compress(plain), "deflate") == (200, None)
        assert await post(plain, "identity") == (200, None)
        assert await post(plain, "gzip") == (400, "invalid_encoding")
        for cut in (1, 4, 8, 20):  # the length, the checksum, the end of the text itself
            assert await post(gzip.compress(plain)[:-cut], "gzip") == (400, "invalid_encoding")
        assert await post(zlib.compress(plain)[:-1], "deflate") == (400, "invalid_encoding")
        assert await post(gzip.compress(plain) + b"more", "gzip") == (400, "invalid_encoding")
        assert await post(plain, "zstd") == (415, "unsupported_encoding")
        assert await post(huge, "gzip") == (413, "too_large")


async def test_errors_come_in_the_shape_that_the_client_expects(stage: Stage) -> None:
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key="nobody", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as raised:
            await client.messages.create(model="m", max_tokens=5, messages=[USER])
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.post("/v1/nothing", body={}, cast_to=object)
        body = missing.value.body
        assert body["type"] == "error"


async def test_models_are_listed_for_every_vendor(stage: Stage) -> None:
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key="x") as client:
        assert [model.id async for model in client.models.list()] == ["checker", "policy"]
        assert (await client.models.retrieve("checker")).display_name == "checker"
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="x") as sdk:
        assert (await sdk.models.retrieve("policy")).id == "policy"
        assert (await sdk.models.retrieve("gpt-9")).id == "gpt-9"
    async with httpx2.AsyncClient() as http_client:
        assert (await http_client.get(f"{stage.url}/v1beta/models")).json()["models"][0]["name"] == "models/checker"
        assert (await http_client.head(stage.url)).status_code == 200


async def test_a_stream_that_is_a_json_list_has_its_media_type(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = await stage.begin()
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.05)  # a comment would break the list
    stage.engine.delay_s = 0.2
    body, headers = {"contents": [{"role": "user", "parts": [{"text": "x"}]}]}, {"x-goog-api-key": attempt.token}
    async with httpx2.AsyncClient() as client:
        answer = await client.post(f"{stage.url}/v1beta/models/m:streamGenerateContent", json=body, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert (
        "".join(part.get("text", "") for chunk in answer.json() for part in chunk["candidates"][0]["content"]["parts"])
        == "hello"
    )


async def test_a_stream_of_anthropics_begins_with_what_the_prompt_costs(stage: Stage) -> None:
    attempt = await stage.begin()
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=attempt.token) as client:
        async with client.messages.stream(model="m", max_tokens=5, messages=[USER]) as stream:
            first = await anext(aiter(stream))
        counted = await client.messages.count_tokens(model="m", messages=[USER])
    assert first.type == "message_start"
    assert first.message.usage.input_tokens == counted.input_tokens > 0
