"""The relay between an agent and a server that comes and goes, over real sockets."""

import asyncio
import gzip
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lightningrl.errors import UserError
from lightningrl.runner import connections, relay
from lightningrl.runner.relay import Relay
from tests.runner.network import network

TOKEN = "lrl-of_the-attempt"
KEY = {"authorization": f"Bearer {TOKEN}"}
ID = "x-lightningrl-request"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """An upstream that keeps what it was asked, and answers as `answer` does."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[web.Request, bytes]] = []
        self.url = ""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request, await request.read()))
        return await self.answer(request)

    @property
    def ids(self) -> list[str | None]:
        return [request.headers.get(ID) for request, _ in self.asked]


@asynccontextmanager
async def serving(answer: Answer, *, port: int = 0) -> AsyncIterator[Server]:
    server = Server(answer)
    app = web.Application(client_max_size=2**27)
    app.router.add_route("*", "/{path:.*}", server.serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def relayed(url: str) -> AsyncIterator[tuple[Relay, aiohttp.ClientSession]]:
    """A relay with one running attempt, and a client of its agent."""
    async with Relay(url) as between, aiohttp.ClientSession(between.url, auto_decompress=False) as agent:
        between.begin("a", TOKEN)
        yield between, agent


async def hello(request: web.Request) -> web.Response:
    return web.json_response({"hello": request.path})


def stuck_once(then: Answer) -> Answer:
    """Never answers the first request."""
    asked = Counter[str]()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked["times"] += 1
        if asked["times"] == 1:
            await asyncio.sleep(60)
        return await then(request)

    return answer


async def until(condition: Callable[[], Any], *, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_request_and_its_answer_pass_through_unchanged() -> None:
    zipped = gzip.compress(b'{"a": 1}')

    async def answer(request: web.Request) -> web.Response:
        headers = [("X-Two", "1"), ("X-Two", "2"), ("content-encoding", "gzip"), ("Retry-After", "7")]
        return web.Response(status=429, headers=headers, body=zipped)

    async with serving(answer) as server, relayed(server.url) as (between, agent):
        headers = [("X-Api-Key", TOKEN), ("Accept", "a"), ("Accept", "b"), ("Content-Encoding", "gzip")]
        sent = await agent.post("/v1/a%2Fb?x=%20y&z", data=zipped, headers=headers, skip_auto_headers=("User-Agent",))
        async with sent as got:
            assert got.status == 429 and got.headers.getall("x-two") == ["1", "2"]
            assert got.headers["retry-after"] == "7" and await got.read() == zipped
        [(request, body)] = server.asked
        assert request.raw_path == "/v1/a%2Fb?x=%20y&z" and body == zipped
        assert request.headers.getall("accept") == ["a", "b"] and request.headers["x-api-key"] == TOKEN
        assert request.headers["host"] == server.url.removeprefix("http://") and "user-agent" not in request.headers
        assert len(request.headers[ID]) == 16 and int(request.headers[ID], 16) >= 0
        assert between.end("a") is None


async def test_the_server_may_be_below_a_path() -> None:
    async with serving(hello) as server, relayed(f"{server.url}/base/") as (_, agent):
        got = await agent.get("/v1/models", headers=KEY)
        assert await got.json() == {"hello": "/base/v1/models"}


async def test_connections_on_both_sides_are_used_again_and_each_post_has_an_id_of_its_own() -> None:
    async with serving(hello) as server, network(server.url) as between, relayed(between.url) as (_, agent):
        for _ in range(5):
            async with agent.post("/v1/x", headers=KEY, json={}) as got:
                assert got.status == 200
        assert len(set(server.ids)) == 5 and between.opened == 1


async def test_an_agent_cannot_choose_the_id_of_its_request() -> None:
    async with serving(hello) as server, relayed(server.url) as (_, agent):
        async with agent.post("/v1/x", headers={**KEY, ID: "0" * 16}) as got:
            assert got.status == 200
        assert server.ids != ["0" * 16] and len(server.asked[0][0].headers.getall(ID)) == 1


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/x", {"x-api-key": TOKEN}),
        ("/v1/x", {"x-goog-api-key": TOKEN}),
        ("/v1/x", {"baggage": f"a=b,lightningrl.token={TOKEN};p=1", "authorization": "Bearer lightningrl"}),
        (f"/r/{TOKEN}/v1/x", {}),
        (f"/v1beta/x?key={TOKEN}", {}),
    ],
)
async def test_a_broken_request_is_sent_again_wherever_its_token_stands(path: str, headers: dict[str, str]) -> None:
    async with (
        serving(stuck_once(hello)) as server,
        network(server.url) as between,
        relayed(between.url) as (_, agent),
    ):
        asking = asyncio.create_task(agent.post(path, headers=headers, data=b"body"))
        await until(lambda: server.asked)
        between.cut()
        between.is_cut = False
        async with await asking as got:
            assert got.status == 200
        assert len(server.ids) == 2 and server.ids[0] == server.ids[1] is not None
        assert [body for _, body in server.asked] == [b"body", b"body"]


async def test_a_request_waits_for_a_server_that_is_not_there_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with relayed(f"http://127.0.0.1:{port}") as (between, agent):
        asking = asyncio.create_task(agent.post("/v1/x", headers=KEY))
        await asyncio.sleep(0.3)
        async with serving(hello, port=port) as server, await asking as got:
            assert got.status == 200 and len(server.ids) == 1
        assert between.end("a") is None


KILLED = """
import asyncio, sys
from aiohttp import web
async def answer(request):
    print("asked", flush=True)
    await asyncio.sleep(float(sys.argv[2]))
    return web.json_response({"id": request.headers["x-lightningrl-request"]})
app = web.Application()
app.router.add_post("/{path:.*}", answer)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


async def test_a_server_may_be_killed_and_started_again_in_the_middle_of_requests(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(KILLED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def start(wait_s: float) -> asyncio.subprocess.Process:
        command = [sys.executable, str(tmp_path / "server.py"), str(port), str(wait_s)]
        return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    server = await start(60)
    async with relayed(f"http://127.0.0.1:{port}") as (between, agent):
        asking = [asyncio.create_task(agent.post("/v1/x", headers=KEY, json={"i": i})) for i in range(5)]
        assert server.stdout is not None
        for _ in asking:
            assert await server.stdout.readline() == b"asked\n"
        server.kill()
        await server.wait()
        server = await start(0)
        answers = await asyncio.gather(*asking)
        assert all(answer.status == 200 for answer in answers)
        assert len({(await answer.json())["id"] for answer in answers}) == 5
        assert between.end("a") is None
    server.kill()
    await server.wait()


async def streamed(request: web.Request, *, pieces: int = 3, wait_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for i in range(pieces):
        await response.write(b"data: %d\n\n" % i)
        await asyncio.sleep(wait_s)
    await response.write_eof()
    return response


async def test_a_stream_comes_piece_by_piece() -> None:
    go = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go.wait()
        await response.write(b"data: 2\n\n")
        return response

    async with serving(answer) as server, relayed(server.url) as (between, agent):
        async with agent.post("/v1/x", headers=KEY) as got:
            assert await got.content.readany() == b"data: 1\n\n"
            go.set()
            assert await got.content.read() == b"data: 2\n\n"
        assert between.end("a") is None


async def test_a_stream_that_breaks_disturbs_its_attempt_and_no_other() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await streamed(request, pieces=100, wait_s=0.05)

    async with serving(answer) as server, network(server.url) as between, relayed(between.url) as (proxy, agent):
        proxy.begin("b", "lrl-b")
        async with agent.post("/v1/x", headers=KEY) as got:
            assert await got.content.readany()
            between.cut()
            with pytest.raises(aiohttp.ClientPayloadError):
                await got.content.read()
        assert "broke in the middle of an answer" in (proxy.end("a") or "") and proxy.end("b") is None
        assert len(server.asked) == 1


async def test_the_rest_of_a_stream_that_broke_is_not_sampled() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await (hello(request) if request.path == "/abandon" else streamed(request, pieces=100, wait_s=0.05))

    async with serving(answer) as server, network(server.url) as between, relayed(between.url) as (_, agent):
        async with agent.post("/v1/x", headers=KEY) as got:
            assert await got.content.readany()
            between.cut()
            between.is_cut = False
            await until(lambda: len(server.asked) == 2)
        request, body = server.asked[1]
        assert request.path == "/abandon" and json.loads(body) == {"request": server.ids[0]}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name these options differently")
async def test_connections_to_the_server_are_kept_alive() -> None:
    async with serving(hello) as server:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: connections.ServerConnection(ended=lambda _: None), "127.0.0.1", int(server.url.rpartition(":")[2])
        )
        options = transport.get_extra_info("socket")
        assert options.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == connections.KEEPALIVE_S
        transport.abort()


async def test_an_answer_of_known_length_that_breaks_is_asked_for_again() -> None:
    cut: list[Callable[[], None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "6"})
        await response.prepare(request)
        await response.write(b"abc")
        if cut:
            await asyncio.sleep(0.05)
            cut.pop()()
            await asyncio.sleep(60)
        await response.write(b"def")
        return response

    async with serving(answer) as server, network(server.url) as between, relayed(between.url) as (proxy, agent):

        def cut_once() -> None:
            between.cut()
            between.is_cut = False

        cut.append(cut_once)
        async with agent.post("/v1/x", headers=KEY) as got:
            assert await got.read() == b"abcdef"
        assert proxy.end("a") is None and len(server.ids) == 2 and len(set(server.ids)) == 1


async def test_a_reward_that_may_have_been_recorded_disturbs_its_attempt() -> None:
    async with (
        serving(stuck_once(hello)) as server,
        network(server.url) as between,
        relayed(between.url) as (proxy, agent),
    ):
        asking = asyncio.create_task(agent.post("/v1/rewards", headers=KEY, json={"value": 1}))
        await until(lambda: server.asked)
        between.cut()
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert "while it took a reward" in (proxy.end("a") or "") and len(server.asked) == 1


async def test_a_reward_waits_for_a_server_that_was_away() -> None:
    async with serving(hello) as server, network(server.url) as between, relayed(between.url) as (proxy, agent):
        between.is_cut = True
        closing = asyncio.create_task(agent.post("/v1/x", headers=KEY))
        await until(lambda: between.opened >= 2)
        between.is_cut = False
        async with await closing as got, await agent.post("/v1/rewards", headers=KEY) as rewarded:
            assert got.status == rewarded.status == 200
        assert proxy.end("a") is None and len(server.asked) == 2


async def test_requests_into_a_network_that_drops_are_sent_again_when_the_server_is_back() -> None:
    async with serving(hello) as server, network(server.url) as between, relayed(between.url) as (proxy, agent):
        between.drops = True
        asking = [asyncio.create_task(agent.post("/v1/x", headers=KEY)) for _ in range(3)]
        await until(lambda: between.opened >= 3)
        proxy.server_away()  # a heartbeat has failed
        await until(lambda: between.opened >= 6)  # they try at once, which no one answers either
        await asyncio.sleep(0.3)
        assert not server.asked and not any(task.done() for task in asking)
        between.drops = False
        proxy.server_back()
        answers = await asyncio.wait_for(asyncio.gather(*asking), 1.0)
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert proxy.end("a") is None and len(set(server.ids)) == 3


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (503, "<html>no server</html>"),
        (502, ""),
        (504, '"upstream request timeout"'),
        (503, '{"error": {"message": "the run has ended", "code": "run_ended"}}'),
    ],
)
async def test_what_a_proxy_says_of_a_server_that_is_away_is_not_an_answer(status: int, body: str) -> None:
    left = [(status, body)] * 2

    async def answer(request: web.Request) -> web.Response:
        if not left:
            return web.json_response({})
        told, text = left.pop()
        return web.Response(status=told, text=text)

    async with serving(answer) as server, relayed(server.url) as (proxy, agent):
        async with agent.post("/v1/x", headers=KEY) as got:
            assert got.status == 200
        assert len(server.ids) == 3 and len(set(server.ids)) == 1 and proxy.end("a") is None


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_an_error_of_the_server_is_an_answer(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "the engine broke"}}, status=status)

    async with serving(answer) as server, relayed(server.url) as (_, agent):
        async with agent.post("/v1/x", headers=KEY) as got:
            assert got.status == status and (await got.json())["error"]["message"] == "the engine broke"
        assert len(server.asked) == 1


async def test_an_agent_that_gives_up_is_reported_to_the_server() -> None:
    async with serving(stuck_once(hello)) as server, relayed(server.url) as (proxy, agent):
        asking = asyncio.create_task(agent.post(f"/r/{TOKEN}/v1/x?a=b", headers={"x-api-key": "k"}, json={"a": 1}))
        await until(lambda: server.asked)
        asking.cancel()
        await until(lambda: len(server.asked) == 2)
        request, body = server.asked[1]
        assert request.method == "POST" and request.raw_path == f"/r/{TOKEN}/abandon?a=b"
        assert json.loads(body) == {"request": server.ids[0]} and request.headers["x-api-key"] == "k"
        assert request.headers.getall("content-type") == ["application/json"] and ID not in request.headers
        assert proxy.end("a") is None


async def test_the_end_of_an_attempt_ends_its_requests_and_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with relayed(f"http://127.0.0.1:{port}") as (proxy, agent):
        proxy.begin("b", "lrl-b")
        ended = asyncio.create_task(agent.post("/v1/x", headers=KEY))
        other = asyncio.create_task(agent.post("/v1/x", headers={"x-api-key": "lrl-b"}))
        await asyncio.sleep(0.05)
        assert proxy.end("a") is None and proxy.end("a") is None
        with pytest.raises(aiohttp.ClientError):
            await ended
        async with serving(hello, port=port), await other as got:
            assert got.status == 200


async def test_a_request_without_a_running_attempt_is_passed_on_once() -> None:
    async with serving(hello) as server, network(server.url) as between, relayed(between.url) as (_, agent):
        async with agent.post("/v1/x", headers={"x-api-key": "lrl-other"}) as got:
            assert got.status == 200 and server.ids == [None]
        between.is_cut = True
        async with agent.post("/v1/x") as got:
            assert got.status == 502 and (await got.json())["error"]["code"] == "server_away"


async def test_a_web_page_cannot_reach_the_server_through_the_relay() -> None:
    async with serving(hello) as server, relayed(server.url) as (_, agent):
        got = await agent.post("/v1/x", headers={"host": "evil.example"})
        assert got.status == 403 and not server.asked


@pytest.mark.parametrize("key", [{}, KEY, {"x-api-key": TOKEN, "authorization": "Bearer lrl-worker-key"}])
async def test_an_agent_that_found_the_worker_key_cannot_use_it(key: dict[str, str]) -> None:
    ways = ["/workers", "/workers/finish", "//v1//workers/", "/r/x/workers/hello", "/r//workers", "/%77orkers/finish"]
    ways += ["/%2577orkers", "/x/..%2Fworkers", "http://localhost/workers/finish", "/workers?x", "/workers#x"]
    sent = "".join(f"{name}: {value}\r\n" for name, value in key.items())
    async with serving(hello) as server, relayed(server.url) as (proxy, agent):
        for way in ways:
            said = await raw(proxy, f"POST {way} HTTP/1.1\r\nhost: localhost\r\n{sent}\r\n".encode())
            assert said.startswith(b"HTTP/1.1 403 ") and b"forbidden_path" in said, way
        assert not server.asked
        async with agent.post("/v1/x?a=/workers", headers=key, data=b"workers") as got:
            assert got.status == 200


async def test_a_slow_reader_slows_down_its_stream_alone() -> None:
    written = Counter[str]()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("x"):
            return await hello(request)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(640):
            await response.write(b"x" * 65536)
            written["bytes"] += 65536
        return response

    async with serving(answer) as server, relayed(server.url) as (proxy, agent):
        async with agent.post("/v1/large", headers=KEY) as got:
            await asyncio.sleep(0.3)
            assert written["bytes"] < 30 * 2**20, "the relay does not read what its agent does not"
            async with agent.post("/v1/x", headers=KEY) as other:
                assert other.status == 200
            assert len(await got.read()) == 640 * 65536
        assert proxy.end("a") is None


async def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_LIMIT", 1_000_000)
    async with serving(hello) as server, relayed(server.url) as (_, agent):
        async with agent.post("/v1/x", headers=KEY, data=b"x" * 1_000_000) as got:
            assert got.status == 200
        async with agent.post("/v1/x", headers=KEY, data=b"x" * 1_000_001) as got:
            assert got.status == 413 and len(server.asked) == 1


async def test_headers_that_never_end_are_refused() -> None:
    async with serving(hello) as server, relayed(server.url) as (proxy, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_there_is_a_limit_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CONNECTIONS", 2)
    async with serving(hello) as server, relayed(server.url) as (proxy, _):
        opened = [await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2])) for _ in range(3)]
        assert await opened[2][0].read() == b""
        opened[0][1].write(b"GET / HTTP/1.0\r\nx-api-key: lrl-of_the-attempt\r\n\r\n")
        assert (await opened[0][0].readline()).startswith(b"HTTP/1.")
        for _, writer in opened:
            writer.close()


async def raw(proxy: Relay, request: bytes) -> bytes:
    """What comes back for these bytes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5.0)
    writer.close()
    return answer


async def test_unusual_requests_are_understood() -> None:
    async with serving(hello) as server, relayed(server.url) as (proxy, agent):
        key = f"host: localhost\r\nx-api-key: {TOKEN}\r\n".encode()
        async with agent.head("/v1/x", headers=KEY) as got:
            assert got.status == 200 and await got.read() == b""
        async with agent.post("/v1/x", headers=KEY, data=b"abc", expect100=True) as got:
            assert got.status == 200
        java = b"POST /j HTTP/1.1\r\n" + key + b"connection: Upgrade, close\r\nupgrade: h2c\r\n"
        java += b"content-length: 2\r\n\r\nab"
        assert b'"/j"' in await raw(proxy, java) and server.asked[-1][1] == b"ab"
        old = b"POST /o HTTP/1.0\r\n" + key + b"content-length: 2\r\n\r\nab"
        assert b'"/o"' in await raw(proxy, old) and server.asked[-1][0].version == (1, 0)
        pieces = b"POST /c HTTP/1.1\r\n" + key + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        assert b'"/c"' in await raw(proxy, pieces + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n") and server.asked[-1][1] == b"ab"
        two = (b"GET /1 HTTP/1.1\r\n" + key + b"\r\n") + (b"GET /2 HTTP/1.1\r\n" + key + b"connection: close\r\n\r\n")
        both = await raw(proxy, two)
        assert 0 < both.index(b'"/1"') < both.index(b'"/2"')
        assert (await raw(proxy, b"no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert proxy.end("a") is None


@asynccontextmanager
async def speaking(first: bytes, then: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that says these bytes to a request, and closes the connection. Yields its URL and its requests."""
    asked: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(first if len(asked) == 1 else then)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    server.close()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\nabc"
    async with speaking(answer, answer) as (url, _), relayed(url) as (proxy, agent):
        async with agent.get("/", headers=KEY) as got:
            assert await got.read() == b"abc"
        assert proxy.end("a") is None


async def test_a_server_that_speaks_no_http_is_like_one_that_is_away() -> None:
    async with (
        speaking(b"garbage\r\n", b"HTTP/1.1 204 No Content\r\n\r\n") as (url, asked),
        relayed(url) as (_, agent),
    ):
        got = await agent.get("/", headers=KEY)
        assert got.status == 204 and len(asked) == 2


def test_the_url_of_the_server_is_checked() -> None:
    with pytest.raises(UserError, match="not the URL of a server"):
        Relay("server:8100")


async def test_agents_in_a_network_of_their_own_reach_the_relay_at_another_address() -> None:
    async with serving(hello) as server, Relay(server.url, host="127.0.0.2") as between:
        assert between.url.startswith("http://127.0.0.2:")
        between.begin("a", TOKEN)
        async with aiohttp.ClientSession(between.url) as agent:
            assert await (await agent.get("/v1/models", headers=KEY)).json() == {"hello": "/v1/models"}


async def test_an_address_that_is_not_this_machines_is_an_error_of_the_user() -> None:
    with pytest.raises(UserError, match="agents cannot be served at `192") as caught:
        async with Relay("http://127.0.0.1:1", host="192.0.2.1"):
            pass
    assert caught.value.hint is not None and "agent.relay_host" in caught.value.hint
