"""Connections of hostile or broken clients: endless headers and bodies, half requests, leaving in mid-stream."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lightningrl.gateway import connection
from lightningrl.gateway.http import HEADER_LIMIT

from .conftest import Stage

USER: Any = {"role": "user", "content": "say a word"}
LOTS = 64 * 1024 * 1024
"""Bytes."""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"


@asynccontextmanager
async def connected(stage: Stage) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def chat(token: str, **more: Any) -> bytes:
    body = json.dumps({"model": "m", "messages": [USER], **more}).encode()
    return HEAD + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (token.encode(), len(body), body)


async def pour(writer: asyncio.StreamWriter, piece: bytes, *, at_most: int) -> int:
    """Send the piece repeatedly. Returns the number of bytes sent before the other side closed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < at_most:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    return sent


@pytest.mark.parametrize("begun", [HEAD + b"x-endless: ", b"POST /", HEAD], ids=["value", "path", "many"])
async def test_an_endless_header_is_cut_off(stage: Stage, begun: bytes) -> None:
    piece = b"x-a: b\r\n" * 1024 if begun == HEAD else b"a" * 8192
    async with connected(stage) as (_, writer):
        writer.write(begun)
        assert await pour(writer, piece, at_most=LOTS) < LOTS


async def test_endless_trailers_are_cut_off(stage: Stage) -> None:
    attempt = await stage.begin()
    async with connected(stage) as (_, writer):
        token = attempt.token.encode()
        writer.write(
            HEAD + b"transfer-encoding: chunked\r\nauthorization: Bearer %b\r\n\r\n1\r\n{\r\n0\r\nx-endless: " % token
        )
        assert await pour(writer, b"a" * 8192, at_most=LOTS) < LOTS


async def test_the_answer_to_a_long_header_says_what_the_limit_is(stage: Stage) -> None:
    async with connected(stage) as (reader, writer):
        writer.write(HEAD + b"x-long: " + b"a" * HEADER_LIMIT)
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the server receives two pieces, too
        writer.write(b"a")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "too_large"


@pytest.mark.parametrize(
    "half", [b"", b"POST /v1/ch", HEAD, HEAD + b"content-length: 100\r\nauthorization: Bearer TOKEN\r\n\r\n{"]
)
async def test_half_a_request_does_not_stay_open(stage: Stage, half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ARRIVAL_S", 0.2)
    attempt = await stage.begin()
    async with connected(stage) as (reader, writer):
        writer.write(half.replace(b"TOKEN", attempt.token.encode()))
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_an_answer_may_take_longer_than_a_request(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ARRIVAL_S", 0.1)
    stage.engine.delay_s = 0.5
    attempt = await stage.begin()
    async with connected(stage) as (reader, writer):
        writer.write(chat(attempt.token) + b"POST /half")  # pipelining: the next request does not wait for the answer
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"hello") == 1


async def test_a_pipelined_request_does_not_end_the_previous_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ARRIVAL_S", 0.1)
    stage.engine.delay_s = 0.1
    stage.says("a b c d e f g h")
    attempt = await stage.begin()
    half, rest = (b := chat(attempt.token))[:-5], b[-5:]
    async with connected(stage) as (reader, writer):
        writer.write(chat(attempt.token, stream=True) + half)  # its body stays unread until the first answer is there
        answer = await reader.readuntil(b"[DONE]")
        assert answer.count(b"HTTP/1.1") == 1 and b" 408 " not in answer
        writer.write(rest)


async def test_the_token_is_checked_before_the_body_is_read(stage: Stage) -> None:
    for path in (b"/v1/chat/completions", b"/v1/embeddings", b"/v1/rewards", b"/v1/traces"):
        async with connected(stage) as (reader, writer):
            writer.write(
                b"POST %b HTTP/1.1\r\nhost: h\r\nauthorization: Bearer nobody\r\ncontent-length: 1000\r\n\r\n" % path
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")


async def test_a_client_that_leaves_in_mid_stream_leaves_no_traceback(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.says("one two three four five six seven eight nine ten " * 20)
    stage.engine.delay_s = 0.002
    attempt = await stage.begin()
    for _ in range(5):
        async with connected(stage) as (reader, writer):
            writer.write(chat(attempt.token, stream=True))
            await reader.readline()
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # a reset, as when a client is killed
    async with asyncio.timeout(60):
        while stage.engine.cancelled < 5:
            await asyncio.sleep(0.01)
    assert not caplog.records
