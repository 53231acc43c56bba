"""Agents as a gateway sees them: many at once, each with its own key and a growing conversation, without pauses.

Reads a `Load` as JSON from stdin, and prints an `Outcome` as JSON.

    python benchmarks/gateway/clients.py < load.json
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvloop

SYSTEM = (
    "You write SQL for the database of a shop. Tables: customers(id, name, country), orders(id, customer_id, day,"
    " total), items(order_id, product, count, price). Answer with one query, nothing else; after you have seen its"
    " result, mend it or say that it is done."
)
RESULT = (
    "The database answers: 3 rows in 12 ms, the first of them is ('{name}', {number})."
    " Which customers bought more than that in the year before?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of the clients."""

    attempts: list[tuple[str, str]]
    """(base URL with `/v1`, API key) of each attempt; an attempt may occur more than once."""
    turns: int = 1
    """Calls of each attempt, in sequence, each with the conversation so far."""
    tokens: int = 50
    """Sampled tokens per call."""
    stream: bool = False
    concurrency: int = 64
    """Attempts that run at the same time."""
    ramp_s: float = 0.0
    """Seconds over which the first attempts start."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    calls: int = 0
    """Calls that were answered correctly."""
    errors: Counter[str] = field(default_factory=Counter[str])
    started: float = 0.0
    wall_s: float = 0.0
    reads: int = 0
    """Chunks in which streamed answers arrived."""
    latency_s: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    open_peak: int = 0
    """Largest number of simultaneous calls."""


class Delta(msgspec.Struct):
    content: str | None = None


class Piece(msgspec.Struct):
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None


class Body(msgspec.Struct):
    choices: list[Piece] = []
    error: Any = None


class Unanswered(Exception):
    """The answer is not the expected one."""


class Clients:
    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self._load = load
        self._session = session
        self._rng = random.Random(load.seed)
        self._open = 0
        self.outcome = Outcome()

    async def run(self) -> None:
        attempts = iter(self._load.attempts)
        self.outcome.started = time.perf_counter()
        lanes = min(self._load.concurrency, len(self._load.attempts))
        await asyncio.gather(*(self._lane(attempts, self._load.ramp_s * lane / lanes) for lane in range(lanes)))
        self.outcome.wall_s = time.perf_counter() - self.outcome.started

    async def _lane(self, attempts: Iterator[tuple[str, str]], after_s: float) -> None:
        if after_s > 0:
            await asyncio.sleep(after_s)
        for url, key in attempts:
            messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
            for _ in range(self._load.turns):
                name = self._rng.randbytes(4).hex()
                number = self._rng.randrange(10**6)
                messages.append({"role": "user", "content": RESULT.format(name=name, number=number)})
                try:
                    answer = await self._call(url, key, messages)
                except (aiohttp.ClientError, TimeoutError, OSError, Unanswered, msgspec.DecodeError) as error:
                    self.outcome.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                    break
                messages.append({"role": "assistant", "content": answer})

    async def _call(self, url: str, key: str, messages: list[dict[str, str]]) -> str:
        body = {
            "model": "bench",
            "messages": messages,
            "max_tokens": self._load.tokens,
            "temperature": 1.0,
            "stream": self._load.stream,
        }
        started = time.perf_counter()
        self._open += 1
        self.outcome.open_peak = max(self.outcome.open_peak, self._open)
        try:
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            data = msgspec.json.encode(body)
            async with self._session.post(f"{url}/chat/completions", data=data, headers=headers) as response:
                if response.status != 200:
                    raise Unanswered(f"{response.status} {(await response.text())[:150]}")
                answer = await (self._streamed(response, started) if self._load.stream else self._whole(response))
        finally:
            self._open -= 1
        self.outcome.calls += 1
        self.outcome.latency_s.append(time.perf_counter() - started)
        return answer

    async def _whole(self, response: aiohttp.ClientResponse) -> str:
        choice = msgspec.json.decode(await response.read(), type=Body).choices[0]
        if choice.finish_reason != "stop" or choice.message is None or not choice.message.content:
            raise Unanswered(f"an answer that ended with `{choice.finish_reason}`")
        return choice.message.content

    async def _streamed(self, response: aiohttp.ClientResponse, started: float) -> str:
        pieces: list[bytes] = []
        async for piece in response.content.iter_any():
            if not pieces:
                self.outcome.first_byte_s.append(time.perf_counter() - started)
            pieces.append(piece)
        self.outcome.reads += len(pieces)
        events = [event[6:] for event in b"".join(pieces).split(b"\n\n") if event.startswith(b"data: ")]
        if not events or events.pop() != b"[DONE]":
            raise Unanswered("a stream without its end")
        bodies = [msgspec.json.decode(event, type=Body) for event in events]
        choices = [choice for body in bodies for choice in body.choices]
        if any(body.error for body in bodies) or choices[-1].finish_reason != "stop":
            raise Unanswered(f"a stream that ended with `{events[-1].decode()[:100]}`")
        return "".join(choice.delta.content or "" for choice in choices if choice.delta is not None)


async def main() -> None:
    load = Load(**json.load(sys.stdin))
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        clients = Clients(load, session)
        await clients.run()
    sys.stdout.write(msgspec.json.encode(clients.outcome).decode())


if __name__ == "__main__":
    uvloop.run(main())
