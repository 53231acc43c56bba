"""What a server may have done already is not asked for again."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from lightningrl.hosted.once import UNKNOWN, Once, takes_client

ANSWERS = {
    "/api/v1/forward_backward": (b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", UNKNOWN),
    "/api/v1/optim_step": (b"", UNKNOWN),  # the connection is closed
    "/api/v1/save_weights": (b"HTTP/1.1 429 Later\r\ncontent-length: 0\r\n\r\n", 429),
    "/api/v1/retrieve_future": (b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", 500),
}
"""Path → what the server writes, and the status that the SDK sees. It repeats requests after 408, 409, 429 and 5xx."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(ANSWERS[head.split(b" ")[1].decode()][0])
    await writer.drain()
    writer.close()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("path", ANSWERS)
async def test_only_an_answer_that_may_be_lost_is_not_to_be_asked_for_again(path: str, url: str) -> None:
    async with httpx.AsyncClient(transport=Once(httpx.AsyncHTTPTransport())) as client:
        found = await client.post(url + path)
    assert found.status_code == ANSWERS[path][1]


async def test_a_server_that_is_not_there_may_be_asked_again() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    async with httpx.AsyncClient(transport=Once(httpx.AsyncHTTPTransport())) as client:
        with pytest.raises(httpx.ConnectError):
            await client.post(f"http://127.0.0.1:{port}/api/v1/optim_step")


def test_a_client_is_only_passed_to_sdks_that_take_one() -> None:
    assert takes_client("0.24.1") and not takes_client("0.25.0") and not takes_client("1.0")
