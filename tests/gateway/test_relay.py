"""Another server answers: it gets the agent's request without our token, and its answer is recorded."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import openai
import pytest

from lightningrl.gateway import Route, create_app
from lightningrl.gateway.app import Gateway
from lightningrl.gateway.upstream import Upstream
from lightningrl.types import Attempt, Call

from .conftest import Stage, serving

USER: Any = {"role": "user", "content": "say a word"}
EVENT = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
)


@dataclass
class There:
    """Another server. It keeps the requests that it gets, and its answers are chosen by a test."""

    answer: Callable[[Any, Any], Awaitable[None]]
    asked: list[tuple[str, bytes, dict[bytes, bytes], bytes]] = field(default_factory=list)
    left_after_s: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.asked.append((scope["path"], scope["query_string"], dict(scope["headers"]), body))
        began = time.monotonic()
        answering = asyncio.ensure_future(self.answer(scope, send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            self.left_after_s = time.monotonic() - began
        answering.cancel()
        leaving.cancel()


def says(
    body: bytes, *, status: int = 200, kind: bytes = b"application/json", **headers: str
) -> Callable[[Any, Any], Awaitable[None]]:
    async def answer(scope: Any, send: Any) -> None:
        more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]})
        await send({"type": "http.response.body", "body": body})

    return answer


async def drips(scope: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(200):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0.02)


async def hangs(scope: Any, send: Any) -> None:
    await asyncio.sleep(100)


@dataclass
class Between:
    """A gateway that relays every model but `own`."""

    gateway: Gateway
    url: str
    there: There
    attempt: Attempt
    stage: Stage

    async def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, timeout_s: float = 5.0
    ) -> httpx2.Response:
        async with httpx2.AsyncClient(timeout=timeout_s) as client:
            return await client.post(
                self.url + path, json=body, headers=headers or {"authorization": f"Bearer {self.attempt.token}"}
            )

    async def calls(self) -> list[Call]:
        return await self.stage.calls(self.attempt)


@pytest.fixture
async def between(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Between]:
    async with handing_on(stage, monkeypatch) as found:
        yield found


@asynccontextmanager
async def handing_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Between]:
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    there = There(says(b'{"ok": 1}'))
    async with serving(there) as address:
        upstream = Upstream("other", url=f"{address}/v1", key_env="OTHER_KEY")
        routes, engines = [Route(model="own"), Route(policy="upstreams.other")], {"policy": stage.engine}
        app = create_app(
            store=stage.store,
            chat=stage.template,
            engines=engines,
            routes=routes,
            upstreams=[upstream],
            embeddings="upstreams.other",
            max_length=2000,
        )
        async with serving(app) as url:
            yield Between(app, url, there, await stage.begin(), stage)
        await upstream.close()


CHAT = {"model": "gpt", "messages": [USER]}


@pytest.mark.parametrize(
    ("path", "header", "key"),
    [
        ("/v1/chat/completions", "authorization", "Bearer sk-other"),
        ("/v1/chat/completions", "api-key", "sk-other"),
        ("/v1/messages", "x-api-key", "sk-other"),
        ("/v1beta/models/g:generateContent", "x-goog-api-key", "sk-other"),
    ],
)
async def test_the_upstreams_key_replaces_the_token_and_no_token_is_forwarded(
    between: Between, path: str, header: str, key: str
) -> None:
    token = between.attempt.token
    body = {"contents": [{"parts": [{"text": "x"}]}]} if "models" in path else {**CHAT, "max_tokens": 5}
    headers = {
        header: f"Bearer {token}" if header == "authorization" else token,
        "te": "trailers",
        "x-kept": "1",
        "baggage": f"lightningrl.token={token}",
    }
    assert (await between.post(f"/r/{token}{path}?alt=sse&key={token}", body, headers)).json() == {"ok": 1}
    [(_, query, sent, _)] = between.there.asked
    assert token not in repr(between.there.asked)
    assert query == b"alt=sse"
    keys = {name: value for name, value in sent.items() if b"sk-other" in value}
    assert keys == {header.encode(): key.encode()}
    assert b"te" not in sent
    assert sent[b"x-kept"] == b"1"


async def test_a_token_in_the_query_becomes_a_key_in_googles_header(between: Between) -> None:
    await between.post(
        f"/v1beta/models/g:generateContent?key={between.attempt.token}",
        {"contents": [{"parts": [{"text": "x"}]}]},
        {"x-kept": "1"},
    )
    [(_, query, sent, _)] = between.there.asked
    assert (query, sent[b"x-goog-api-key"]) == (b"", b"sk-other")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_client_that_goes_away_ends_the_upstreams_work_within_a_second(between: Between, path: str) -> None:
    between.there.answer = hangs
    with pytest.raises(httpx2.TimeoutException):
        await between.post(path, CHAT, timeout_s=0.2)
    await asyncio.sleep(0.5)
    assert between.there.left_after_s is not None
    assert between.gateway._in_flight == 0
    assert [(call.capture, call.finish_reason) for call in await between.calls()] == [("incomplete", "cancelled")] * (
        path != "/v1/embeddings"
    )


async def test_a_client_that_goes_away_in_mid_stream_ends_it(between: Between) -> None:
    between.there.answer = drips
    async with openai.AsyncOpenAI(base_url=f"{between.url}/v1", api_key=between.attempt.token) as client:
        pieces = await client.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
        async for _ in pieces:
            break
        await pieces.close()
    await asyncio.sleep(0.5)
    assert between.there.left_after_s is not None
    [call] = await between.calls()
    assert (call.capture, call.capture_reason) == ("incomplete", "the client went away")
    assert str(call.response).count("chunk") >= 1


async def test_an_answer_that_breaks_off_is_an_error(between: Between) -> None:
    async def breaks(scope: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json"), (b"content-length", b"99")],
            }
        )
        await send({"type": "http.response.body", "body": b'{"id": ', "more_body": True})

    between.there.answer = breaks
    answer = await between.post("/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
    [call] = await between.calls()
    assert call.capture == "incomplete"
    assert call.capture_reason is not None and "broke off" in call.capture_reason


async def test_a_malformed_answer_is_an_error_although_the_upstream_keeps_the_connection(between: Between) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"no length\r\n")
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    upstream = Upstream("other", url=f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1")
    app = create_app(
        store=between.stage.store,
        chat=between.stage.template,
        engines={"policy": between.stage.engine},
        routes=[Route(policy="upstreams.other")],
        upstreams=[upstream],
        max_length=2000,
    )
    async with serving(app) as url:
        answer = await replace(between, url=url).post("/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
    await upstream.close()
    listening.close()


async def test_a_stream_that_breaks_off_ends_with_an_error(between: Between) -> None:
    async def breaks(scope: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": EVENT + EVENT, "more_body": True})
        await asyncio.sleep(0.1)

    between.there.answer = breaks
    seen = 0
    async with openai.AsyncOpenAI(base_url=f"{between.url}/v1", api_key=between.attempt.token) as client:
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in await client.chat.completions.create(**CHAT, stream=True):  # type: ignore[call-overload]
                seen += 1
    assert seen == 2
    assert [call.capture for call in await between.calls()] == ["incomplete"]


async def test_a_redirect_is_not_followed_with_our_key(between: Between) -> None:
    between.there.answer = says(b"", status=307, location="http://127.0.0.1:1/elsewhere")
    answer = await between.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 502
    assert "redirects to `http://127.0.0.1:1/elsewhere`" in answer.json()["error"]["message"]
    assert len(between.there.asked) == 1


async def test_packed_answers_and_refusals_come_back_as_they_are(between: Between) -> None:
    between.there.answer = says(gzip.compress(b'{"packed": 1}'), content_encoding="gzip")
    assert (await between.post("/v1/chat/completions", CHAT)).json() == {"packed": 1}
    between.there.answer = says(b'{"error": "slow down"}', status=429, retry_after="7")
    refused = await between.post("/v1/chat/completions", CHAT)
    assert (refused.status_code, refused.headers["retry-after"], refused.json()) == (429, "7", {"error": "slow down"})
    assert [call.capture for call in await between.calls()] == ["upstream", "incomplete"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", lambda body: body["error"]["message"]),
        ("/v1/messages", lambda body: body["error"]["message"] if body["type"] == "error" else ""),
        ("/v1/embeddings", lambda body: body["error"]["message"]),
    ],
)
async def test_an_error_that_is_a_page_is_told_in_the_dialects_shape(
    between: Between, path: str, told: Callable[[Any], str]
) -> None:
    between.there.answer = says(b"<html>bad gateway</html>", status=502, kind=b"text/html", retry_after="3")
    answer = await between.post(path, {**CHAT, "max_tokens": 5})
    assert (answer.status_code, answer.headers["content-type"], answer.headers["retry-after"]) == (
        502,
        "application/json",
        "3",
    )
    assert told(answer.json()) == "the upstream answered with status 502: <html>bad gateway</html>"
    assert [call.capture_reason for call in await between.calls()] == ["the upstream answered with status 502"] * (
        path != "/v1/embeddings"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": [USER]}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1beta/models/gpt:countTokens", {"contents": [{"parts": [{"text": "x"}]}]}),
    ],
)
async def test_an_upstream_counts_its_own_tokens(between: Between, path: str, body: dict[str, Any]) -> None:
    assert (await between.post(path, {**body, "model": "gpt"})).json() == {"ok": 1}
    assert (await between.post(path.replace("gpt", "own"), {**body, "model": "own"})).status_code == 200
    assert len(between.there.asked) == 1
    assert await between.calls() == []


async def test_azures_embeddings_go_to_the_common_path(between: Between) -> None:
    between.there.answer = says(
        b'{"object":"list","model":"e","data":[{"object":"embedding","index":0,"embedding":[0.5]}]}'
    )
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=between.url, api_version="2024-10-21", api_key=between.attempt.token
    ) as client:
        answer = await client.embeddings.create(model="e", input="x", encoding_format="float")
    assert answer.data[0].embedding == [0.5]
    [(path, _, _, body)] = between.there.asked
    assert (path, json.loads(body)["model"]) == ("/v1/embeddings", "e")


async def test_an_upstream_may_understand_requests_that_the_gateway_does_not(between: Between) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
    assert (await between.post("/v1/chat/completions", {"model": "gpt", "messages": [picture]})).status_code == 200
    assert (await between.post("/v1/chat/completions", {"model": "own", "messages": [picture]})).status_code == 400
    assert (
        await between.post("/v1/responses", {"model": "gpt", "input": "x", "previous_response_id": "resp_theirs"})
    ).status_code == 200
    assert json.loads(between.there.asked[0][3])["messages"] == [picture]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "a title"},
                    {"role": "user", "content": [{"type": "image_url"}]},
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "system": "a title",
                "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}],
                "max_tokens": 5,
            },
        ),
        (
            "/v1/responses",
            {"instructions": "a title", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        ),
        (
            "/v1beta/models/m:generateContent",
            {
                "systemInstruction": {"parts": [{"text": "a title"}]},
                "contents": [{"parts": [{"inlineData": {"data": "AA=="}}]}],
            },
        ),
    ],
)
async def test_instructions_lead_to_an_upstream_although_there_are_pictures(
    between: Between, path: str, body: dict[str, Any]
) -> None:
    between.gateway.routes = (Route(system="a title", policy="upstreams.other"), Route())
    assert (await between.post(path, {"model": "m", **body})).json() == {"ok": 1}
    assert (
        await between.post(path, {"model": "m", **json.loads(json.dumps(body).replace("a title", "a song"))})
    ).status_code == 400
    assert [call.request["model"] for call in await between.calls()] == ["m"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_is_sent_to_the_upstream_once(between: Between, stream: bool) -> None:
    async def slowly(scope: Any, send: Any) -> None:
        await asyncio.sleep(0.5)
        await says(EVENT if stream else b'{"ok": 1}', kind=b"text/event-stream" if stream else b"application/json")(
            scope, send
        )

    between.there.answer = slowly
    retry = {"authorization": f"Bearer {between.attempt.token}", "x-stainless-retry-count": "1"}
    first = asyncio.create_task(between.post("/v1/chat/completions", CHAT))
    while not between.there.asked:
        await asyncio.sleep(0.005)
    again = await between.post("/v1/chat/completions", CHAT, retry)
    assert again.content == (await first).content == (EVENT if stream else b'{"ok": 1}')
    assert len(between.there.asked) == len(await between.calls()) == 1


async def test_a_request_that_an_upstream_refused_is_sent_again(between: Between) -> None:
    retry = {"authorization": f"Bearer {between.attempt.token}", "x-stainless-retry-count": "1"}
    between.there.answer = says(b'{"error": "slow down"}', status=429)
    assert (await between.post("/v1/chat/completions", CHAT)).status_code == 429
    between.there.answer = says(b'{"ok": 1}')
    assert (await between.post("/v1/chat/completions", CHAT, retry)).json() == {"ok": 1}
    assert [call.capture for call in await between.calls()] == ["incomplete", "upstream"]


async def test_a_rebuilt_session_skips_relayed_calls(between: Between) -> None:
    between.there.answer = says(b"event: response.completed\ndata: {}\n\n", kind=b"text/event-stream")
    assert (await between.post("/v1/responses", {"model": "gpt", "input": "x", "stream": True})).status_code == 200
    between.gateway.sessions._sessions.clear()
    assert (await between.post("/v1/responses", {"model": "own", "input": "x"})).status_code == 200
    assert [call.capture for call in await between.calls()] == ["upstream", "rendered"]


async def test_a_stream_whose_attempt_ends_meanwhile_ends_with_an_error(between: Between) -> None:
    async def ends(scope: Any, send: Any) -> None:
        await between.stage.store.finish(between.attempt.id, "failed")
        await says(EVENT, kind=b"text/event-stream")(scope, send)

    between.there.answer = ends
    answer = await between.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert "the attempt of this token has ended" in answer.text
    assert await between.calls() == []
