"""A pool reads responses no faster than they are used, gives up silent servers, and names the server in every error."""

import asyncio
import contextlib
import gc
import itertools
import re
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import pytest
import uvloop

from lightningrl.engine import http
from lightningrl.engine.http import LONGEST_REST_S, REST_S, Pool
from lightningrl.errors import EngineError, UserError

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]
Talk: TypeAlias = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HELLO = OK + b"Content-Length: 5\r\n\r\nhello"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Server:
    """Raw sockets: `talk` is called with each connection."""

    def __init__(self, talk: Talk) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        """One per request."""
        self.opened = self.closed = 0
        """Connections."""
        self._talk = talk
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._talk(self, reader, writer)
        finally:
            self.closed += 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """The body of the next request."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        self.bodies.append(await reader.readexactly(int(length[1]) if length else 0))
        return self.bodies[-1]

    async def end(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 5.0)


@contextlib.asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[tuple[Server, Pool]]:
    """A server that talks like this, and a pool in front of it."""
    server = Server(talk)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    pool = Pool([server.url], engine="vllm")
    try:
        async with asyncio.timeout(20.0):
            yield server, pool
    finally:
        await pool.close()
        listening.close()
        await server.end()


async def ask(pool: Pool, body: bytes = b"{}") -> bytes:
    return await pool.complete(pool.servers[0], body)


def stream(pool: Pool, body: bytes = b"{}") -> contextlib.aclosing[Any]:
    return contextlib.aclosing(pool.stream(pool.servers[0], body))


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 20",
        OK + b"Content-Length: 50\r\n\r\nhello",
        CHUNKED + b"5\r\nhello\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
def test_a_response_that_breaks_off_is_an_error_that_names_the_server(run: Run, said: bytes, streamed: bool) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(said)
        await writer.drain()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            with pytest.raises(EngineError, match=f"`{server.url}` broke off"):
                if streamed:
                    async with stream(pool) as pieces:
                        _ = [piece async for piece in pieces]
                else:
                    await ask(pool)

    run(main())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_malformed_body_is_an_error_although_the_server_keeps_the_connection(run: Run, streamed: bool) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"no length\r\n")
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            with pytest.raises(EngineError, match=f"`{server.url}` broke off"):
                async with asyncio.timeout(2.0):
                    if streamed:
                        async with stream(pool) as pieces:
                            _ = [piece async for piece in pieces]
                    else:
                        await ask(pool)

    run(main())


def test_a_kept_connection_that_the_server_resets_is_not_logged(run: Run) -> None:
    logged: list[dict[str, Any]] = []

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await server.request(reader)
            writer.write(HELLO[:-1])
            await asyncio.sleep(0.05)
            writer.write(HELLO[-1:])
        await asyncio.sleep(0.05)
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with talking(talk) as (server, pool):
            assert [await ask(pool), await ask(pool)] == [b"hello", b"hello"]
            await until(lambda: server.closed == server.opened == 1)
            await asyncio.sleep(0.05)
            assert await ask(pool) == b"hello"
            gc.collect()
        assert not logged

    run(main())


@pytest.mark.parametrize("meets", [False, True], ids=["noticed before", "met by the request"])
def test_a_kept_connection_that_the_server_closes_costs_nothing(run: Run, meets: bool) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(HELLO)
        await writer.drain()
        if meets:
            await server.request(reader)

    async def main() -> None:
        async with talking(talk) as (server, pool):
            for number in range(3):
                assert await ask(pool, b"%d" % number) == b"hello"
                if not meets:
                    await until(lambda: server.closed == server.opened)
                    await asyncio.sleep(0.01)
            assert server.bodies == ([b"0", b"1", b"1", b"2", b"2"] if meets else [b"0", b"1", b"2"])

    run(main())


@pytest.mark.parametrize("answer", [b"", OK + b"Content-"], ids=["nothing", "a part of the headers"])
def test_a_request_that_the_server_may_have_begun_is_not_repeated(run: Run, answer: bytes) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer:  # a reused connection
            await server.request(reader)
            writer.write(HELLO)
        await server.request(reader)
        writer.write(answer)

    async def main() -> None:
        async with talking(talk) as (server, pool):
            if answer:
                await ask(pool)
            server.bodies.clear()
            with pytest.raises(EngineError, match="broke off"):
                await pool.post(pool.servers[0], "/v1/load_lora_adapter", {})
            assert server.bodies == [b"{}"]

    run(main())


@pytest.mark.parametrize("how", ["whole", "before the first piece", "between pieces", "left"])
def test_a_request_that_is_given_up_closes_its_connection_at_once(run: Run, how: str) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        if how in ("between pieces", "left"):
            writer.write(CHUNKED + b"5\r\nhello\r\n")
        assert await reader.read() == b""

    async def use(pool: Pool) -> None:
        if how == "whole":
            await ask(pool)
        async with stream(pool) as pieces:
            assert await anext(pieces) == b"hello"
            if how != "left":
                await anext(pieces)

    async def main() -> None:
        async with talking(talk) as (server, pool):
            task = asyncio.create_task(use(pool))
            if how == "left":
                await task
            else:
                await until(lambda: len(server.bodies) == 1)
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: server.closed == 1, timeout_s=0.5)

    run(main())


def test_a_stream_is_read_no_faster_than_it_is_used(run: Run) -> None:
    total, sent = 32 * 2**20, 0
    piece = bytes(range(256)) * 256

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await server.request(reader)
        writer.write(CHUNKED)
        while sent < total:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            sent += len(piece)
            await writer.drain()

    async def main() -> None:
        async with talking(talk) as (_, pool), stream(pool) as pieces:
            await anext(pieces)
            await asyncio.sleep(0.3)
            before = sent
            await asyncio.sleep(0.2)
            assert sent == before < total, "reading has stopped"
            while sent == before:
                await anext(pieces)

    run(main())


async def drip(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A byte every millisecond, until the client leaves."""
    await server.request(reader)
    writer.write(CHUNKED)
    with contextlib.suppress(ConnectionError):
        while not writer.is_closing():
            writer.write(b"1\r\n.\r\n")
            await asyncio.sleep(REST_S / 20)


def test_pieces_come_in_batches_and_the_first_one_at_once(run: Run) -> None:
    async def main() -> None:
        async with talking(drip) as (_, pool):
            began, times = time.monotonic(), []
            async with stream(pool) as pieces:
                async for _ in pieces:
                    times.append(time.monotonic() - began)
                    if len(times) == 20:
                        break
            assert times[0] < 0.5
            assert times[-1] >= 18 * REST_S

    run(main())


def test_an_older_stream_rests_for_longer_but_never_for_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REST_SHARE", 0.5)

    async def main() -> None:
        async with talking(drip) as (_, pool):
            began, times = time.monotonic(), []
            async with stream(pool) as pieces:
                async for _ in pieces:
                    times.append(time.monotonic())
                    if times[-1] > began + 1.0:
                        break
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            latest = statistics.median(gaps[-5:])
            assert statistics.median(gaps[:2]) < LONGEST_REST_S
            assert LONGEST_REST_S - REST_S < latest < 2 * LONGEST_REST_S + REST_S

    run(main())


def test_a_server_that_falls_silent_is_given_up_but_not_one_that_is_slow(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "IDLE_S", 2.0)

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slow = await server.request(reader) == b"slow"
        for byte in HELLO if slow else HELLO[:-1]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02 if slow else 0)
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            assert await ask(pool, b"slow") == b"hello"
            with pytest.raises(EngineError, match="broke off: SocketTimeoutError"):
                await ask(pool, b"silent")
            await until(lambda: server.closed >= 1)

    run(main())


@pytest.mark.parametrize("status", [b"200 OK", b"500 Oops"])
def test_a_response_that_does_not_end_is_given_up(run: Run, status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_LIMIT", 2**20)

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await server.request(reader) == b"long":
            writer.write(OK + b"Content-Length: %d\r\n\r\n" % 2**20 + bytes(2**20))
        else:
            writer.write(b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
            while True:
                writer.write(b"10000\r\n%b\r\n" % bytes(2**16))
                await writer.drain()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            assert len(await ask(pool, b"long")) == 2**20
            with pytest.raises(EngineError, match=f"`{server.url}` sent a response of more than `1048576` bytes"):
                async with asyncio.timeout(2.0):
                    await ask(pool)
            await until(lambda: server.closed == server.opened)

    run(main())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_server_that_does_not_read_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_S", 0.3)
    monkeypatch.setattr(http, "IDLE_S", 0.2)
    given_up = asyncio.Event()

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await given_up.wait()
        writer.transport.abort()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            with pytest.raises(EngineError, match=f"`{server.url}` broke off: .* could not be sent in time"):
                async with asyncio.timeout(2.0):
                    await ask(pool, b"x" * 20_000_000)
            given_up.set()

    run(main())


def test_unused_connections_are_closed_in_time_and_not_capped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0.2)

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        await until(lambda: server.opened == 150)
        writer.write(HELLO)
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            await asyncio.gather(*(ask(pool) for _ in range(150)))
            assert (server.opened, server.closed) == (150, 0)
            await until(lambda: server.closed == 150)

    run(main())


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_closed_pool_ends_what_runs_and_takes_no_more(run: Run, streamed: bool) -> None:
    async def use(pool: Pool) -> None:
        if not streamed:
            await ask(pool)
        async with stream(pool) as pieces:
            _ = [piece async for piece in pieces]

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        if streamed:
            writer.write(CHUNKED + b"5\r\nhello\r\n")
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (server, pool):
            runs = asyncio.create_task(use(pool))
            await until(lambda: len(server.bodies) == 1)
            await asyncio.sleep(0.1)
            connects = asyncio.create_task(use(pool))
            await asyncio.sleep(0)
            await pool.close()
            for waits in (runs, connects, ask(pool)):
                with pytest.raises(EngineError, match="closed"):
                    await waits

    run(main())


def test_a_server_that_cannot_be_reached_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_S", 0.3)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
            address = full.getsockname()
            for _ in range(4):  # so that no further connection is accepted
                waits = stack.enter_context(socket.socket())
                waits.setblocking(False)
                waits.connect_ex(address)
            for url in ("http://127.0.0.1:1", "http://nowhere.invalid", f"http://127.0.0.1:{address[1]}"):
                pool = Pool([url], engine="vllm")
                with pytest.raises(EngineError, match=f"cannot reach `{url}`"):
                    await ask(pool)
                await pool.close()

    run(main())


@pytest.mark.parametrize(
    "url", ["", "host:8000", "ftp://host", "http://", "http://host:99999", "http://host:x", "http://host/?a=b"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="not the address of a server"):
        Pool([url], engine="vllm")
