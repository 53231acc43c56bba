"""What does a worker's relay cost? Latency of a call and of a stream, direct and through it, and its CPU.

A server that answers at once, the relay, and one client are three processes. The client sends calls one after the
other, in turn to the server and to the relay, so that both have the same machine. Then 32 calls at once through each.
CPU is user + system time of the relay's process, from /proc. Linux only.

    python benchmarks/relay.py [--quick] [--json benchmarks/results/relay.json]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from lightningrl.runner.relay import Relay

TOKEN = "lrl-benchmark"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}).encode()
ANSWER = b'{"choices": [{"message": {"role": "assistant", "content": "%b"}}]}' % (b"x" * 500)
EVENTS = 200
"""Events of one stream: an event a token."""
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
EVENT_S = 0.001
AT_ONCE = 32
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Server(asyncio.Protocol):
    """Answers each request at once: a stream if its path says so."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._arrived = b""

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        if self._arrived.endswith(BODY):
            streams = b"/stream" in self._arrived[:200]
            self._arrived = b""
            if streams:
                self._streaming = asyncio.ensure_future(self._stream())
            else:
                self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)

    async def _stream(self) -> None:
        write = self._transport.write
        write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(EVENTS):
            write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await asyncio.sleep(EVENT_S)
        write(b"0\r\n\r\n")


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


async def relay(url: str) -> None:
    async with Relay(url) as between:
        between.begin("a", TOKEN)
        print(between.url, flush=True)
        await asyncio.Event().wait()


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def cpu_s(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


async def call(client: aiohttp.ClientSession, url: str) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    async with client.post(url, data=BODY, headers={"authorization": f"Bearer {TOKEN}"}) as got:
        assert got.status == 200 and await got.read()
    return time.perf_counter() - began


async def measured(direct: str, relayed: str, process: subprocess.Popen[str], *, calls: int) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        taken: dict[str, list[float]] = {direct: [], relayed: []}
        for i in range(2 * calls):
            url = (direct, relayed)[i % 2]
            taken[url].append(await call(client, f"{url}/v1/chat/completions"))
        medians = [statistics.median(taken[url]) * 1e3 for url in (direct, relayed)]
        before = cpu_s(process)
        for _ in range(calls // AT_ONCE):
            await asyncio.gather(*(call(client, f"{relayed}/v1/chat/completions") for _ in range(AT_ONCE)))
        cpu_ms = (cpu_s(process) - before) / (calls // AT_ONCE * AT_ONCE) * 1e3
        streams: dict[str, list[float]] = {direct: [], relayed: []}
        before = cpu_s(process)
        for i in range(2 * max(2, calls // 1000)):
            url = (direct, relayed)[i % 2]
            streams[url] += await asyncio.gather(*(call(client, f"{url}/stream") for _ in range(AT_ONCE)))
        events = len(streams[relayed]) * EVENTS
        return {
            "direct_ms": medians[0],
            "relayed_ms": medians[1],
            "ratio": medians[1] / medians[0],
            "cpu_ms_per_call": cpu_ms,
            "cpu_us_per_event": (cpu_s(process) - before) / events * 1e6,
            "stream_ratio": statistics.median(streams[relayed]) / statistics.median(streams[direct]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 calls instead of 10,000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", choices=["server", "relay"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        uvloop.run(serve() if arguments.run == "server" else relay(arguments.url))
        return
    server, direct = started("--run", "server")
    between, relayed = started("--run", "relay", "--url", direct)
    try:
        found = uvloop.run(measured(direct, relayed, between, calls=2_000 if arguments.quick else 10_000))
    finally:
        for process in (between, server):
            process.kill()
            process.wait()
    print(f"one call          {found['direct_ms']:.2f} ms direct, {found['relayed_ms']:.2f} ms relayed", end=" ")
    print(f"({found['ratio']:.2f} times)")
    print(f"{AT_ONCE} streams        {found['stream_ratio']:.3f} times as long relayed")
    print(f"CPU of the relay  {found['cpu_ms_per_call']:.3f} ms a call, {found['cpu_us_per_event']:.1f} µs an event")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
