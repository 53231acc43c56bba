"""Many agents that call a model, on workers that go to another gateway when theirs is gone.

They remember what was acknowledged: the ids of answers, and the attempts whose end was confirmed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import msgspec

import lightningrl
from lightningrl.leases import Outcome
from lightningrl.remote.wire import Beat, Claim, Copy, Finish, Finished, Given, Held, Hello, Welcome
from lightningrl.types import Attempt

T = TypeVar("T")
ANSWER_S = 60.0
REQUEST: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "say a word"}]}


class Refused(Exception):
    """The gateway has answered with an error."""


@dataclass(slots=True)
class Acknowledged:
    """What gateways have confirmed."""

    calls: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Attempt → ids of its answers."""
    finished: list[str] = field(default_factory=list[str])
    """Attempts whose success was confirmed."""
    refused: int = 0
    """Requests of attempts that were lost."""


class Agents:
    """`workers` × `size` agents, each with `calls` calls. Worker n begins at gateway n modulo their number."""

    def __init__(self, urls: Sequence[str], key: str, *, workers: int, size: int, calls: int, lease_s: float) -> None:
        self._urls, self._key, self._size, self._calls, self._lease_s = urls, key, size, calls, lease_s
        self._names = [f"w{number}-{number:06x}" for number in range(workers)]
        self.seen = Acknowledged()
        self.moves = 0
        """How often a worker has gone to another gateway."""

    async def run(self) -> None:
        """Until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session:
            await asyncio.gather(*(self._worker(name, number) for number, name in enumerate(self._names)))

    async def _worker(self, name: str, number: int) -> None:
        """Work at one gateway until it is gone, then at the next."""
        await asyncio.sleep(number / 200)  # not all of them in one instant
        while True:
            url = self._urls[number % len(self._urls)]
            attempts: dict[str, asyncio.Task[None]] = {}
            beating = asyncio.create_task(self._beat(url, name, attempts))
            try:
                await self._work(url, name, attempts)
            except (aiohttp.ClientError, TimeoutError):
                self.moves += 1
                number += 1
                await asyncio.sleep(0.2)
            finally:
                for task in (beating, *attempts.values()):
                    task.cancel()
                await asyncio.gather(beating, *attempts.values(), return_exceptions=True)

    async def _work(self, url: str, name: str, attempts: dict[str, asyncio.Task[None]]) -> None:
        hello = Hello(
            worker=name,
            name=name,
            concurrency=self._size,
            version=lightningrl.__version__,
            copy=Copy(files={}, agent={}),
        )
        await self._ask(url, "hello", hello, Welcome)
        while True:
            if len(attempts) == self._size:
                await asyncio.wait(attempts.values(), return_when=asyncio.FIRST_COMPLETED)
            for attempt_id in [attempt_id for attempt_id, task in attempts.items() if task.done()]:
                attempts.pop(attempt_id).result()
            claim = Claim(worker=name, limit=self._size - len(attempts), holding=list(attempts))
            for _, attempt in (await self._ask(url, "claim", claim, Given)).attempts:
                attempts[attempt.id] = asyncio.create_task(self._attempt(url, name, attempt))

    async def _attempt(self, url: str, name: str, attempt: Attempt) -> None:
        headers = {"authorization": f"Bearer {attempt.token}"}
        try:
            for _ in range(self._calls):
                answer = await self._post(f"{url}/v1/chat/completions", headers, msgspec.json.encode(REQUEST))
                self.seen.calls.setdefault(attempt.id, []).append(msgspec.json.decode(answer)["id"])
            outcome = Outcome(status="succeeded", output="done")
            await self._ask(url, "finish", Finish(worker=name, attempt=attempt.id, outcome=outcome), Finished)
            self.seen.finished.append(attempt.id)
        except Refused:
            self.seen.refused += 1

    async def _beat(self, url: str, name: str, attempts: dict[str, asyncio.Task[None]]) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if attempts:
                await self._ask(url, "heartbeat", Beat(worker=name, holding=list(attempts)), Held)

    async def _ask(self, url: str, verb: str, message: msgspec.Struct, kind: type[T]) -> T:
        headers = {"authorization": f"Bearer {self._key}"}
        body = await self._post(f"{url}/workers/{verb}", headers, msgspec.json.encode(message))
        return msgspec.json.decode(body, type=kind)

    async def _post(self, url: str, headers: dict[str, str], body: bytes) -> bytes:
        headers = {"content-type": "application/json", **headers}
        async with self._session.post(url, data=body, headers=headers) as answer:
            found = await answer.read()
            if answer.status != 200:
                raise Refused(f"{url}: {answer.status} {found[:300]!r}")
            return found
