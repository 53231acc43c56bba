"""Long prompts: tokenized exactly, without blocking other requests, and refused early if they are too long."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.chat.encoder import LONG, LongText, TooManyTokens, beforehand
from lightningrl.gateway import create_app
from lightningrl.messages import Message
from lightningrl.store.sqlite import SQLiteStore

from .conftest import ScriptedEngine, Stage, serving

LINE = "2026-11-22 05:46:18 INFO worker[%d] GET /v1/things?id=7 200 0.013s naïve café 🦊\n"


@asynccontextmanager
async def roomy(template: ChatTemplate, *, max_length: int) -> AsyncIterator[Stage]:
    """A stage whose engine holds long prompts."""
    store, engine = await SQLiteStore.open(":memory:"), ScriptedEngine(lambda prompt_ids, sampling: ())
    gateway = create_app(store=store, chat=template, engines={"policy": engine}, max_length=max_length)
    async with serving(gateway) as url:
        stage = Stage(store=store, template=template, engine=engine, gateway=gateway, url=url)
        stage.says("hello")
        yield stage
    await store.close()


def log_of(characters: int) -> str:
    return (LINE * (characters // len(LINE) + 1))[:characters]


@pytest.mark.parametrize(
    "text",
    [log_of(LONG + 1), "a" * (LONG + 1), " " * (LONG + 1) + "x", "<|im_end|>" * LONG],
    ids=["log", "a", "spaces", "ends"],
)
def test_long_texts_have_the_ids_of_the_plain_tokenizer(template: ChatTemplate, text: str) -> None:
    plain = template._tokenizer.encode(text, add_special_tokens=False).ids
    assert template.encode(text) == template.encode_long(text, most=len(plain)) == plain
    assert template.decode(plain, control=True) == text
    with beforehand({}), pytest.raises(LongText) as raised:
        template.encode(text)
    assert raised.value.text == text
    with beforehand({text: plain}):
        assert template.encode(text) is plain


def test_a_text_that_is_too_long_is_refused_before_all_of_it_is_tokenized(template: ChatTemplate) -> None:
    text = log_of(60_000_000)
    began = time.process_time()
    with pytest.raises(TooManyTokens):
        template.encode_long(text, most=2000)
    assert time.process_time() - began < 2  # tokenizing all of it takes a minute


def test_long_beginnings_are_not_remembered(template: ChatTemplate) -> None:
    starts = template._encoder._short_start
    before = starts.cache_info().currsize
    for size in (LONG + 1, 100):
        template.render([Message(role="system", content=f"{size} " + log_of(size)), Message(role="user", content="x")])
    assert starts.cache_info().currsize == before + 1


async def test_a_long_prompt_is_answered_and_continued(template: ChatTemplate) -> None:
    async with roomy(template, max_length=1_000_000) as stage:
        attempt = await stage.begin()
        messages: list[Any] = [
            {"role": "system", "content": log_of(LONG * 2)},
            {"role": "user", "content": log_of(LONG * 3)},
        ]
        async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token) as client:
            for _ in range(2):
                answer = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
                messages += [answer, {"role": "user", "content": log_of(LONG * 2)}]
            raw = await client.completions.create(model="m", prompt=[log_of(LONG + 1), log_of(LONG + 2), "short"])
        first, second, *others = await stage.calls(attempt)
        asked = [Message(role="system", content=log_of(LONG * 2)), Message(role="user", content=log_of(LONG * 3))]
        assert first.prompt_ids.tolist() == template.render(asked)
        assert (second.capture, second.parent_call_id) == ("bridged", first.id)
        assert [call.prompt_ids.tolist() for call in others] == [
            template.encode(text) for text in (log_of(LONG + 1), log_of(LONG + 2), "short")
        ]
        assert len(raw.choices) == 3


async def test_a_prompt_that_is_far_too_long_is_refused_and_not_recorded(stage: Stage) -> None:
    attempt = await stage.begin()
    messages: Any = [{"role": "user", "content": log_of(4_000_000)}]
    async with openai.AsyncOpenAI(base_url=stage.url, api_key=attempt.token, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="at most `1999` fit") as raised:
            await client.chat.completions.create(model="m", messages=messages)
        assert raised.value.code == "context_length_exceeded"
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=attempt.token, max_retries=0) as sdk:
        with pytest.raises(anthropic.BadRequestError, match="at most `1999` fit"):
            await sdk.messages.count_tokens(model="m", messages=messages)
    assert await stage.calls(attempt) == []


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_is_not_answered(template: ChatTemplate) -> None:
    async with roomy(template, max_length=10_000_000) as stage:
        attempt = await stage.begin()
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": log_of(8_000_000)}]}).encode()
        with socket.create_connection(("127.0.0.1", int(stage.url.rpartition(":")[2]))) as sock:
            sock.setblocking(False)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"
            head += b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(sock, head % (attempt.token.encode(), len(body)) + body)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            while not stage.gateway._in_flight:
                await asyncio.sleep(0.005)
        async with asyncio.timeout(3):
            while stage.gateway._in_flight:
                await asyncio.sleep(0.01)
        assert not stage.engine.asked


async def test_large_json_of_many_small_things_is_refused(stage: Stage) -> None:
    attempt = await stage.begin()
    async with httpx2.AsyncClient(headers={"x-api-key": attempt.token}, timeout=120) as client:

        async def post(body: bytes) -> tuple[int, str | None]:
            answer = await client.post(f"{stage.url}/v1/chat/completions", content=body)
            return answer.status_code, answer.json().get("error", {}).get("code")

        whole = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "x": 1}).encode()[:-2]
        assert await post(whole + b"[" + b",".join([b"{}"] * 3_000_000) + b"]}") == (413, "too_large")
        assert await post(whole + b"{" + b",".join(b'"%d\\\\":0' % n for n in range(500_000)) + b"}}") == (
            413,
            "too_large",
        )
        assert (await post(whole + b"[" + b",".join([b"123"] * 500_000) + b"]}"))[0] == 200
        assert (await post(whole + json.dumps('{"a": "b\\", ", [], {}}' * 500_000).encode() + b"}"))[0] == 200
