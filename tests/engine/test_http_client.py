"""The client brings back what a server says, to the byte, however it says it; and whatever else happens is an error
that names the server.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import itertools
import re
import socket
import ssl
import statistics
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lightningrl.engine import http_client
from lightningrl.engine.http_client import LONGEST_REST_S, REST_S, Client, Connection
from lightningrl.errors import EngineError

Run = Callable[[Coroutine[Any, Any, None]], None]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = OK + b"content-length: 5\r\n\r\nhello"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Server:
    """Raw sockets: `talk` is called with each connection."""

    def __init__(self, talk: Talk) -> None:
        self.url = ""
        self.requests: list[tuple[bytes, bytes]] = []
        """Head and body of each."""
        self.connections = self.left = 0
        self._talk = talk
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._talk(reader, writer)
        finally:
            self.left += 1
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """The body of the next one."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        assert length is not None
        self.requests.append((head, await reader.readexactly(int(length[1]))))
        return self.requests[-1][1]

    async def end(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 5.0)


@contextlib.asynccontextmanager
async def talking(
    talk: Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], **settings: Any
) -> AsyncIterator[Any]:
    """A server that talks like this, and a client of it."""
    listening = await asyncio.start_server(lambda reader, writer: server.serve(reader, writer), "127.0.0.1", 0)
    server = Server(lambda reader, writer: talk(server, reader, writer))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = Client(server.url, **settings)
    try:
        async with asyncio.timeout(20.0):
            yield server, client
    finally:
        await client.close()
        listening.close()
        await server.end()


def saying(*answers: bytes, pace: int = 0) -> Any:
    """One answer for each request; `pace` bytes at a time. After the last one it hangs up."""

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(server.requests) < len(answers):
            await server.request(reader)
            answer = answers[len(server.requests) - 1]
            for start in range(0, len(answer), pace or len(answer)):
                writer.write(answer[start : start + (pace or len(answer))])
                await writer.drain()
                await asyncio.sleep(0)
            if b"\r\n\r\n" in answer and b"ength" not in answer and b"ncoding" not in answer and b" 204 " not in answer:
                return  # the body ends with the connection

    return talk


async def rest(answer: Connection) -> bytes:
    """All of a stream that is to come."""
    pieces = []
    while piece := await answer.read():
        pieces.append(piece)
    return b"".join(pieces)


async def until(condition: Callable[[], bool], *, timeout_s: float = 2.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


WHOLE = {
    "with a length": (GOOD, 200, b"hello", True),
    "nothing": (OK + b"Content-Length: 0\r\n\r\n", 200, b"", True),
    "in chunks": (CHUNKED + b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", 200, b"hello!", True),
    "in chunks with extensions and trailers": (
        CHUNKED + b'5;a=b;c="d"\r\nhello\r\n0;e\r\nX-Trailer: f\r\n\r\n',
        200,
        b"hello",
        True,
    ),
    "a chunk that looks like the end": (CHUNKED + b"a\r\n...0\r\n\r\n..\r\n0\r\n\r\n", 200, b"...0\r\n\r\n..", True),
    "up to the end of the connection": (OK + b"\r\nhello", 200, b"hello", False),
    "by an old server": (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", False),
    "and good-bye": (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", False),
    "after 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD, 200, b"hello", True),
    "after early hints": (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 3\r\n\r\n" + GOOD,
        200,
        b"hello",
        True,
    ),
    "without a body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "a refusal": (b"HTTP/1.1 429 Too Many\r\nretry-AFTER: 7\r\nContent-Length: 4\r\n\r\nbusy", 429, b"busy", True),
}


@pytest.mark.parametrize("pace", [0, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("said", "status", "body", "kept"), WHOLE.values(), ids=WHOLE.keys())
def test_an_answer_is_what_was_said_however_it_is_said(
    run: Run, said: bytes, status: int, body: bytes, kept: bool, stream: bool, pace: int
) -> None:
    async def main() -> None:
        async with talking(saying(said, GOOD, pace=pace)) as (server, client):
            if stream:
                answer = await client.stream("/x", b"{}")
                assert answer.status == status
                assert await rest(answer) == body
                answer.close()
            else:
                answer = await client.ask("POST", "/x", b"{}")
                assert (answer.status, answer.body) == (status, body)
                assert answer.header("Retry-After") == ("7" if status == 429 else None)
            assert (await client.ask("GET", "/y", b"")).body == b"hello"
            assert server.connections == (1 if kept else 2)

    run(main())


BROKEN = {
    "before it began": (b"", "without an answer"),
    "in the status": (b"HTTP/1.1 20", "in the middle"),
    "in the headers": (OK + b"Content-Le", "in the middle"),
    "after 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n", "in the middle"),
    "in the body": (OK + b"Content-Length: 50\r\n\r\nhello", "in the middle"),
    "in a chunk": (CHUNKED + b"50\r\nhello", "in the middle"),
    "before the last chunk": (CHUNKED + b"5\r\nhello\r\n", "in the middle"),
    "by what is no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "is no HTTP"),
    "by a wrong chunk": (CHUNKED + b"xyz\r\nhello\r\n", "is no HTTP"),
    "by another protocol": (
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        "is no HTTP",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("said", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_an_answer_that_breaks_off_is_an_error_and_nobody_asks_again(
    run: Run, said: bytes, why: str, stream: bool
) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(said)
        await writer.drain()

    async def main() -> None:
        async with talking(talk) as (server, client):
            with pytest.raises(EngineError, match=why) as raised:
                if stream:
                    answer = await client.stream("/x", b"{}")
                    try:
                        await rest(answer)
                    finally:
                        answer.close()
                else:
                    await client.ask("POST", "/x", b"{}")
            assert server.url in str(raised.value)
            assert len(server.requests) == 1

    run(main())


def test_a_reset_in_the_middle_is_an_error_even_where_the_end_of_the_connection_is_the_end(run: Run) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(OK + b"\r\nhello")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def main() -> None:
        async with talking(talk) as (_, client):
            with pytest.raises(EngineError, match="broke off"):
                await client.ask("POST", "/x", b"{}")

    run(main())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("meets", [False, True], ids=["noticed before", "met by the request"])
def test_a_kept_connection_that_the_server_closes_costs_nothing(run: Run, meets: bool, stream: bool) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(GOOD)
        await writer.drain()
        if meets:
            await server.request(reader)

    async def main() -> None:
        async with talking(talk) as (server, client):
            for number in range(3):
                if stream:
                    answer = await client.stream("/x", b"%d" % number)
                    assert await rest(answer) == b"hello"
                    answer.close()
                else:
                    assert (await client.ask("POST", "/x", b"%d" % number)).body == b"hello"
                if not meets:
                    await until(lambda: server.left == server.connections)
                    await asyncio.sleep(0.01)
            asked = [body for _, body in server.requests]
            assert asked == ([b"0", b"1", b"1", b"2", b"2"] if meets else [b"0", b"1", b"2"])

    run(main())


def test_nothing_of_an_answer_is_left_for_the_next_one(run: Run) -> None:
    async def main() -> None:
        told = OK + b"Retry-After: 5\r\ncontent-length: 5\r\n\r\nhello"
        async with talking(saying(told, OK + b"content-length: 9\r\n\r\n.........", OK + b"\r\nhello")) as (
            server,
            client,
        ):
            assert (await client.ask("POST", "/x", b"")).header("Retry-After") == "5"
            unread = await client.stream("/x", b"")  # it has come to its end by then
            assert unread.status == 200
            unread.close()
            last = await client.ask("POST", "/x", b"")
            assert (last.body, last.header("Retry-After")) == (b"hello", None)
            assert server.connections == 1

    run(main())


def test_a_kept_connection_that_dies_in_the_middle_of_an_answer_is_an_error(run: Run) -> None:
    async def main() -> None:
        async with talking(saying(GOOD, GOOD[:-1])) as (server, client):
            await client.ask("POST", "/x", b"")
            with pytest.raises(EngineError, match="in the middle"):
                await client.ask("POST", "/x", b"")
            assert (server.connections, len(server.requests)) == (1, 2)

    run(main())


@pytest.mark.parametrize("too_much", [GOOD, b"!", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_what_nobody_asked_for_is_no_answer_to_the_next_request(run: Run, too_much: bytes, later: bool) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await server.request(reader)
        writer.write(OK + b"content-length: 1\r\n\r\n" + body + (b"" if later else too_much))
        if later:
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(too_much)
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (server, client):
            for number in (b"1", b"2"):
                assert (await client.ask("POST", "/x", number)).body == number
                await asyncio.sleep(0.05)
            assert server.connections == 2

    run(main())


@pytest.mark.parametrize("how", ["whole", "stream before the first piece", "stream", "left"])
def test_whoever_no_longer_waits_closes_the_connection_at_once(run: Run, how: str) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        if how in ("stream", "left"):
            writer.write(CHUNKED + b"5\r\nhello\r\n")
        assert await reader.read() == b""

    async def ask(client: Client) -> None:
        if how == "whole":
            await client.ask("POST", "/x", b"")
        answer = await client.stream("/x", b"")
        try:
            assert await answer.read() == b"hello"
            if how != "left":
                await answer.read()
        finally:
            answer.close()

    async def main() -> None:
        async with talking(talk) as (server, client):
            task = asyncio.create_task(ask(client))
            if how == "left":
                await task
            else:
                await until(lambda: len(server.requests) == 1)
                await asyncio.sleep(0.02)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            began = time.monotonic()
            await until(lambda: server.left == 1)
            assert time.monotonic() - began < 0.5

    run(main())


def test_a_server_is_read_no_faster_than_its_stream_is_taken(run: Run) -> None:
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
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def main() -> None:
        async with talking(talk) as (_, client):
            answer = await client.stream("/x", b"")
            await asyncio.sleep(0.3)
            before = sent
            await asyncio.sleep(0.2)
            assert sent == before < total, "reading has stopped"
            said = await rest(answer)
            answer.close()
            assert said == piece * (total // len(piece))

    run(main())


def test_what_comes_soon_after_a_batch_is_handed_on_with_the_next(run: Run) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(CHUNKED)
        for _ in range(200):
            writer.write(b"1\r\n.\r\n")
            await asyncio.sleep(REST_S / 20)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def main() -> None:
        async with talking(talk) as (_, client):
            began, batches = time.monotonic(), []
            answer = await client.stream("/x", b"")
            while piece := await answer.read():
                batches.append(piece)
            answer.close()
            assert b"".join(batches) == b"." * 200
            assert len(batches) <= (time.monotonic() - began) / REST_S + 3

    run(main())


def test_an_older_stream_rests_for_longer_but_never_for_long(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "REST_SHARE", 0.5)

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(CHUNKED)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"1\r\n.\r\n")
                await asyncio.sleep(REST_S / 20)

    async def main() -> None:
        async with talking(talk) as (_, client):
            began, times = time.monotonic(), []
            answer = await client.stream("/x", b"")
            while await answer.read() and time.monotonic() < began + 1.0:
                times.append(time.monotonic())
            answer.close()
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            assert (
                statistics.median(gaps[:2])
                < LONGEST_REST_S
                <= statistics.median(gaps[-5:])
                < 2 * LONGEST_REST_S + REST_S
            )

    run(main())


def test_the_first_batch_of_a_stream_is_not_kept_waiting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "REST_S", 1.0)

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        for piece in (CHUNKED + b"1\r\n1\r\n", b"1\r\n2\r\n", b"1\r\n3\r\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (_, client):
            began = time.monotonic()
            answer = await client.stream("/x", b"")
            assert await answer.read() == b"1"
            assert time.monotonic() - began < 0.5
            assert await answer.read() == b"23"
            assert time.monotonic() - began >= 0.5
            answer.close()

    run(main())


def test_a_server_that_falls_silent_is_given_up_but_not_one_that_is_slow(run: Run) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slow = await server.request(reader) == b"slow"
        for byte in GOOD if slow else GOOD[:-1]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02 if slow else 0)
        await reader.read()

    async def main() -> None:
        async with talking(talk, idle_s=0.4, keep_alive_s=0.2) as (server, client):
            assert (await client.ask("POST", "/x", b"slow")).body == b"hello"
            with pytest.raises(EngineError, match=r"said nothing for `0.4` s"):
                await client.ask("POST", "/x", b"silent")
            await until(lambda: server.left == server.connections)

    run(main())


def test_a_stream_that_is_taken_slowly_is_not_given_up(run: Run) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(CHUNKED + b"1\r\n1\r\n")
        await asyncio.sleep(0.4)
        writer.write(b"1\r\n2\r\n0\r\n\r\n")
        await reader.read()

    async def main() -> None:
        async with talking(talk, idle_s=0.1, keep_alive_s=0.1) as (_, client):
            answer = await client.stream("/x", b"")
            await asyncio.sleep(0.5)
            assert await rest(answer) == b"12"
            answer.close()

    run(main())


def test_connections_that_nobody_uses_are_dropped_in_time(run: Run) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(GOOD)
        await reader.read()

    async def main() -> None:
        async with talking(talk, keep_alive_s=0.2) as (server, client):
            began = time.monotonic()
            await asyncio.gather(*(client.ask("POST", "/x", b"") for _ in range(5)))
            assert (server.connections, server.left) == (5, 0), "connections are not capped"
            await until(lambda: server.left == 5)
            assert time.monotonic() - began < 1.0

    run(main())


def test_an_answer_without_measure_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_LIMIT", 2**16)

    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start = await server.request(reader)
        writer.write(start)
        for _ in range(10000):
            writer.write(start[-4:] * 1000)
            await writer.drain()

    async def main() -> None:
        async with talking(talk) as (_, client):
            for start in (
                OK + b"\r\nbody",
                CHUNKED + b"fffffff\r\nbody",
                OK + b"X-Header: long",
                b"HTTP/1.1 500 No\r\n\r\nbody",
            ):
                with pytest.raises(EngineError, match="more than `65536` bytes"):
                    await client.ask("POST", "/x", start)
                if b"body" not in start or b" 500 " in start:  # otherwise it is a stream, which has none
                    with pytest.raises(EngineError, match="more than `65536` bytes"):
                        await client.stream("/x", start)

    run(main())


def test_a_closed_client_ends_what_runs_and_takes_no_more(run: Run) -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        await reader.read()

    async def main() -> None:
        async with talking(talk) as (server, client):
            asking = asyncio.create_task(client.ask("POST", "/x", b""))
            await until(lambda: len(server.requests) == 1)
            connecting = asyncio.create_task(client.ask("POST", "/x", b""))
            await asyncio.sleep(0)
            await client.close()
            for waits in (asking, connecting, client.ask("POST", "/x", b"")):
                with pytest.raises(EngineError, match="closed"):
                    await waits

    run(main())


def test_a_server_that_cannot_be_reached_is_named(run: Run) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
            address = full.getsockname()
            for _ in range(4):  # so that nobody else gets in
                waits = stack.enter_context(socket.socket())
                waits.setblocking(False)
                waits.connect_ex(address)
            silent = f"http://127.0.0.1:{address[1]}"
            for url, why in (
                ("http://127.0.0.1:1", "efused|failed"),
                ("http://nowhere.invalid", ""),
                (silent, r"no connection within `0.3` s"),
            ):
                client = Client(url, connect_s=0.3)
                with pytest.raises(EngineError, match=f"cannot reach `{url}`: .*({why})"):
                    await client.ask("GET", "/x", b"")
                await client.close()

    run(main())


@pytest.mark.parametrize(
    "url",
    ["", "host:8000", "ftp://host", "http://", "http://host:99999", "http://host:x", "http://a..b", "http://host/?a=b"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        Client(url)


async def test_a_request_is_written_as_its_address_says() -> None:
    async def talk(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(GOOD)

    async with talking(talk) as (server, _):
        port = server.url.rpartition(":")[2]
        client = Client(f"http://us%40er:päss@LOCALHOST:{port}/base/ä b%2F")
        assert (await client.ask("POST", "/v1/x", b"{}")).body == b"hello"
        await client.close()
        (head, body) = server.requests[0]
        assert head.split(b"\r\n") == [
            b"POST /base/%C3%A4%20b%2F/v1/x HTTP/1.1",
            b"Host: localhost:" + port.encode(),
            b"Content-Type: application/json",
            b"Authorization: Basic dXNAZXI6cMOkc3M=",
            b"Content-Length: 2",
            b"",
            b"",
        ]
        assert body == b"{}"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_may_be_ipv6(run: Run) -> None:
    async def main() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(GOOD)

        server = Server(talk)
        try:
            listening = await asyncio.start_server(server.serve, "::1", 0)
        except OSError:
            pytest.skip("no IPv6 here")
        client = Client(f"http://[::1]:{listening.sockets[0].getsockname()[1]}")
        assert (await client.ask("POST", "/x", b"")).body == b"hello"
        assert b"Host: [::1]:" in server.requests[0][0]
        await client.close()
        listening.close()
        await server.end()

    run(main())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1)
    )
    builder = builder.add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    signed = builder.sign(key, hashes.SHA256())
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "certificate.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM) + plain)
    return tmp_path / "certificate.pem"


@pytest.mark.parametrize("trusted", [True, False])
def test_https_is_spoken_with_servers_that_are_trusted(
    run: Run, trusted: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def main() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.request(reader)
            writer.write(GOOD)
            await server.request(reader)
            writer.write(CHUNKED + b"5\r\nhello\r\n")
            await reader.read()

        server = Server(talk)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
        client = Client(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        if trusted:
            assert (await client.ask("POST", "/x", b"")).body == b"hello"
            answer = await client.stream("/x", b"")
            assert await answer.read() == b"hello"
            answer.close()
            await until(lambda: server.left == 1)
            assert server.connections == 1
        else:
            with pytest.raises(EngineError, match=r"cannot reach `https://127.0.0.1:\d+`: .*CERTIFICATE_VERIFY_FAILED"):
                await client.ask("POST", "/x", b"")
        await client.close()
        listening.close()
        await server.end()

    run(main())
