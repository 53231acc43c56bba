"""Many workers in one process. They speak the protocol of `lightningrl worker`, and their attempts take no time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import msgspec

import lightningrl
from lightningrl.leases import Outcome
from lightningrl.remote.wire import Claim, Copy, Finish, Finished, Given, Hello, Welcome
from lightningrl.types import Attempt, Rollout

T = TypeVar("T")
ANSWER_S = 120.0


@dataclass(slots=True)
class Times:
    """Seconds of the monotonic clock."""

    claims: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Begin and end of each claim that was given work."""
    finishes: list[float] = field(default_factory=list[float])
    """Duration of each finish."""
    given: list[float] = field(default_factory=list[float])
    """When each attempt arrived at its worker."""


Run = Callable[[Rollout, Attempt], Awaitable[Outcome]]


async def at_once(rollout: Rollout, attempt: Attempt) -> Outcome:
    """An attempt that takes no time."""
    return Outcome(status="succeeded", output=rollout.task.input["number"])


class Crowd:
    """`count` workers of `size` attempts each, over one pool of connections."""

    def __init__(self, url: str, key: str, *, count: int, size: int, run: Run = at_once) -> None:
        self._url, self._key, self._size, self._run = url, key, size, run
        self._names = [f"w{number}-{number:06x}" for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self.times = Times()
        self.ended = 0
        """Attempts whose end the server has acknowledged."""

    async def __aenter__(self) -> "Crowd":
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        )
        hellos = [
            Hello(
                worker=name,
                name=name,
                concurrency=self._size,
                version=lightningrl.__version__,
                copy=Copy(files={}, agent={}),
                accept_differences=True,
            )
            for name in self._names
        ]
        for start in range(0, len(hellos), 50):
            await asyncio.gather(*(self._ask("hello", hello, Welcome) for hello in hellos[start : start + 50]))
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._work(name)) for name in self._names]

    async def until(self, ended: int, *, timeout_s: float = 300.0) -> None:
        """Until so many attempts have ended. Raises the error of a worker that failed."""
        deadline = time.monotonic() + timeout_s
        while self.ended < ended:
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, f"only {self.ended} of {ended} attempts have ended"
            await asyncio.sleep(0.02)

    async def _work(self, name: str) -> None:
        holding: dict[str, asyncio.Task[None]] = {}
        while True:
            if len(holding) == self._size:
                await asyncio.wait(holding.values(), return_when=asyncio.FIRST_COMPLETED)
            for attempt_id in [attempt_id for attempt_id, task in holding.items() if task.done()]:
                holding.pop(attempt_id).result()
            began = time.monotonic()
            claim = Claim(worker=name, limit=self._size - len(holding), holding=list(holding))
            attempts = (await self._ask("claim", claim, Given)).attempts
            ended = time.monotonic()
            if attempts:
                self.times.claims.append((began, ended))
                self.times.given += [ended] * len(attempts)
            for rollout, attempt in attempts:
                holding[attempt.id] = asyncio.create_task(self._attempt(name, rollout, attempt))

    async def _attempt(self, name: str, rollout: Rollout, attempt: Attempt) -> None:
        outcome = await self._run(rollout, attempt)
        began = time.monotonic()
        await self._ask("finish", Finish(worker=name, attempt=attempt.id, outcome=outcome), Finished)
        self.times.finishes.append(time.monotonic() - began)
        self.ended += 1

    async def _ask(self, verb: str, message: msgspec.Struct, kind: type[T]) -> T:
        async with self._session.post(f"{self._url}/workers/{verb}", data=msgspec.json.encode(message)) as answer:
            body = await answer.read()
            assert answer.status == 200, (verb, answer.status, body)
            return msgspec.json.decode(body, type=kind)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
