"""`Leases` over HTTP: a worker on another machine claims attempts from its server, keeps them and finishes them.

A server that is away is waited for, as long as it takes: it may be restarted, or the network be cut. Meanwhile attempts
run on, and outcomes wait in memory. What the server does not like (the key, the version, the recipe's copy) is a
`UserError`, at once. `gateway/workers.py` is the server's side.
"""

import asyncio
import io
import math
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from lightningrl.errors import UserError
from lightningrl.leases import Claimed, Outcome
from lightningrl.remote.wire import (
    POLL_S,
    RUN_OVER,
    UNKNOWN_WORKER,
    Beat,
    Bye,
    Claim,
    Failure,
    Finish,
    Finished,
    Given,
    Held,
    Hello,
    Problem,
    Welcome,
)
from lightningrl.types import Attempt, Rollout

T = TypeVar("T")
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Between two tries to reach the server. The last one repeats; each is shortened at random, by up to a half."""
ANSWER_S = 10.0
"""Time for an answer to begin, and between two pieces of it. Claims wait for work besides."""
FINISH_S = 120.0
"""The same for an outcome, which the server may grade. A longer grading is waited for with the next request."""
BEAT_S = 5.0
"""Time for the answer to a heartbeat: it is small, and late ones are of no use."""
MISSED = 2
"""After so many heartbeats in a row without an answer, the connections to the server are taken for dead."""
BYE_S = 2.0
"""Time to say goodbye."""


class Watcher(Protocol):
    """Hears what happens between the worker and its server."""

    def connected(self, welcome: Welcome) -> None:
        """The server has admitted the worker, at the start or after a restart of the server."""
        ...

    def away(self, why: str) -> None:
        """The server does not answer. Told for each failure."""
        ...

    def gone(self) -> None:
        """The server cannot be reached: connections to it may be dead. Told once, until it is back."""
        ...

    def back(self, seconds: float) -> None:
        """The server answers again, after it was away for so long."""
        ...

    def began(self, rollout: Rollout, attempt: Attempt) -> None: ...

    def ended(self, attempt_id: str, outcome: Outcome) -> None:
        """The server has acknowledged the outcome."""
        ...

    def over(self) -> None:
        """The run is complete."""
        ...

    def taken(self, attempt_ids: Collection[str]) -> None:
        """These attempts are no longer this worker's."""
        ...


class Away(Exception):
    """The server did not answer, or cannot at the moment. `gone`: there is no connection to it."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


class _Over(Exception):
    """The run is complete."""


class _Unknown(Exception):
    """The server does not know this worker: it has been restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the server is, and the key that it wants."""

    url: str
    key: str
    ca_file: Path | None = None
    """Certificates to trust in place of the system's; None: the system's."""

    def __post_init__(self) -> None:
        """Raises `UserError` for a wrong URL."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of the port
            usable = False
        if not usable:
            raise UserError(f"`{self.url}` is not the address of a server", hint="write it as `http://server:8100`")


class RemoteLeases:
    """See `Leases`. Open it with `remote_leases`."""

    def __init__(
        self,
        place: Place,
        hello: Hello,
        *,
        session: aiohttp.ClientSession,
        watcher: Watcher,
        max_attempts: float = math.inf,
    ) -> None:
        """`max_attempts`: it claims no more of them."""
        self.lease_s = 0.0
        """Set by the server's welcome."""
        self._url = place.url.rstrip("/")
        self._hello = hello
        self._session = session
        self._watcher = watcher
        self._away_since: float | None = None
        self._gone = False
        """No connection to the server can be made, or heartbeats have had no answer."""
        self._missed = 0
        """Heartbeats without an answer, since the last answer of any kind."""
        self._left = max_attempts
        self.ending = asyncio.Event()
        """Set when the worker shall claim no more, e.g. after `max_attempts`."""
        self._over = False
        """The run is complete."""
        self._finishing: set[str] = set()
        """Attempts whose outcome is being reported, or was since the last heartbeat began: they were not taken away."""
        self._acknowledged: set[str] = set()
        """Those of them whose outcome was acknowledged."""
        self._cut = asyncio.Event()
        """Set, and replaced, when the server is gone, and when it is back: the connections of requests may be dead."""
        self._greeting: asyncio.Task[None] | None = None
        self._greeted = 0
        """How often the server has admitted this worker."""

    @property
    def away_s(self) -> float:
        """Seconds for which the server has not answered; 0: it does."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    async def hello(self) -> None:
        """Introduce the worker. Waits without end if the run is complete. Raises `UserError` if it is not admitted."""
        try:
            await self._greet(self._greeted)
        except _Over:
            await asyncio.Event().wait()

    async def claim(self, *, limit: int, holding: Collection[str]) -> Claimed:
        """See `Leases.claim`. Waits without end once `max_attempts` were claimed."""
        if limit == 0 or self._over:
            return await self._give_back(holding)
        if self._left <= 0:
            await asyncio.Event().wait()
        message = Claim(worker=self._hello.worker, limit=int(min(limit, self._left)), holding=list(holding))
        try:
            given = await self._until_cut(self._ask("claim", message, Given, timeout_s=POLL_S + ANSWER_S))
            claimed = [] if given is None else given.attempts
        except _Over:
            claimed = []
        for rollout, attempt in claimed:
            self._watcher.began(rollout, attempt)
        self._left -= len(claimed)
        if self._left <= 0:
            self.ending.set()
        return claimed

    async def _give_back(self, holding: Collection[str]) -> Claimed:
        """A claim of nothing. If the server is away, `bye` or the leases' end does the same."""
        message = Claim(worker=self._hello.worker, limit=0, holding=list(holding))
        with suppress(Away, _Over, _Unknown):
            await self._once("claim", message, Given, timeout_s=BYE_S)
        return []

    async def heartbeat(self, holding: Collection[str]) -> set[str]:
        """The attempts that are still this worker's; all of them while the server is away."""
        message = Beat(worker=self._hello.worker, holding=list(holding))
        self._finishing -= self._acknowledged
        self._acknowledged.clear()
        try:
            held = set((await self._once("heartbeat", message, Held, timeout_s=BEAT_S)).attempts)
        except Away as away:
            self._missed += 1
            self._failed(away)
        except _Unknown:
            with suppress(_Over):
                await self._greet(self._greeted)
        except _Over:
            pass
        else:
            held |= self._finishing
            if taken := set(holding) - held:
                self._watcher.taken(taken)
            return held
        return set(holding)

    async def finish(self, attempt_id: str, outcome: Outcome) -> None:
        """Report an outcome until the server has acknowledged it. Finishing twice is harmless: the first one counts."""
        message = Finish(worker=self._hello.worker, attempt=attempt_id, outcome=outcome)
        self._finishing.add(attempt_id)
        with suppress(_Over):
            while await self._until_cut(self._ask("finish", message, Finished, timeout_s=FINISH_S)) is None:
                pass
        self._acknowledged.add(attempt_id)
        self._watcher.ended(attempt_id, outcome)

    async def bye(self) -> None:
        """Tell the server that the worker leaves. What it has not finished is lost at once."""
        with suppress(Away, _Over, _Unknown, UserError):  # else the leases will pass
            await self._once("bye", Bye(worker=self._hello.worker), Finished, timeout_s=BYE_S)

    async def close(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
            await asyncio.wait((self._greeting,))

    async def _greet(self, greeted: int) -> None:
        """Say hello, unless another request has done so since `greeted`. It goes on if this request is cancelled."""
        if greeted != self._greeted:
            return
        if self._greeting is None:
            self._greeting = asyncio.create_task(self._say_hello())
            self._greeting.add_done_callback(self._greeting_ended)
        await asyncio.shield(self._greeting)

    async def _say_hello(self) -> None:
        welcome = await self._ask("hello", self._hello, Welcome, timeout_s=ANSWER_S)
        if welcome.differences and not self._hello.accept_differences:
            found = "\n".join(f"  {line}" for line in welcome.differences)
            raise UserError(
                f"this copy of the recipe is not the server's:\n{found}",
                hint="copy the recipe's folder from the server, or go on as it is with `--accept-differences`",
            )
        self.lease_s = welcome.lease_s
        self._greeted += 1
        self._watcher.connected(welcome)

    def _greeting_ended(self, task: asyncio.Task[None]) -> None:
        self._greeting = None
        if not task.cancelled():
            task.exception()  # raised again by the next request, if nobody waits for this one any more

    async def _until_cut(self, asking: Coroutine[Any, Any, T]) -> T | None:
        """The answer; None if the connection may have died meanwhile."""
        task, cut = asyncio.create_task(asking), asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait((task, cut), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            cut.cancel()

    async def _ask(self, verb: str, message: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T:
        """The server's answer; repeats the request until there is one. Raises `_Over` and `UserError`."""
        pauses = _pauses()
        while True:
            greeted = self._greeted
            try:
                return await self._once(verb, message, kind, timeout_s=timeout_s)
            except _Unknown:
                await self._greet(greeted)
            except Away as away:
                self._failed(away)
                await asyncio.sleep(next(pauses))

    async def _once(self, verb: str, message: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T:
        """Raises `Away`, `_Over`, `_Unknown`, and `UserError` for what repeating does not mend."""
        status, body = await self._exchange(verb, message, timeout_s=timeout_s)
        if status == 200:
            answer = _decoded(body, kind)
            self._reached()
            return answer
        problem = _problem(body)
        if problem.code == UNKNOWN_WORKER:
            self._reached()
            raise _Unknown
        if problem.code == RUN_OVER:
            self._end()
            raise _Over
        if status >= 500 or status in (408, 429):
            raise Away(f"status {status}: {problem.message}" if problem.message else f"status {status}")
        raise _refused(self._url, status, problem)

    async def _exchange(self, verb: str, message: msgspec.Struct, *, timeout_s: float) -> tuple[int, bytes]:
        """The status and the body of the answer. Raises `Away`, and `UserError` for a wrong address."""
        timeout = aiohttp.ClientTimeout(connect=min(timeout_s, ANSWER_S), sock_read=timeout_s)
        try:
            body = io.BytesIO(msgspec.json.encode(message))
            url = f"{self._url}/workers/{verb}"
            async with self._session.post(url, data=body, timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.read()
        except aiohttp.ClientConnectorCertificateError as error:
            hint = "give the server's certificate with `--ca-file`"
            raise UserError(f"the certificate of `{self._url}` is not trusted: {error}", hint=hint) from error
        except aiohttp.InvalidURL as error:
            raise UserError(f"`{self._url}` is not an address", hint="write it as `http://server:8100`") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise Away("no connection", gone=True) from error
        except TimeoutError as error:
            raise Away(f"no answer within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise Away(_reason(error), gone=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Away(_reason(error)) from error

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self.ending.set()
            self._watcher.over()

    def _failed(self, away: Away) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
        self._watcher.away(str(away))
        if not self._gone and (away.gone or self._missed >= MISSED):
            self._gone = True
            self._cut_off()
            self._watcher.gone()

    def _reached(self) -> None:
        self._missed = 0
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            self._away_since = None
            if self._gone:
                self._gone = False
                self._cut_off()
            self._watcher.back(seconds)

    def _cut_off(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()


@asynccontextmanager
async def remote_leases(
    place: Place, hello: Hello, *, watcher: Watcher, max_attempts: float = math.inf
) -> AsyncIterator[RemoteLeases]:
    """The leases of a server, which may still have to start: say `hello` first."""
    connector = aiohttp.TCPConnector(limit=0, ssl=trusted(place.ca_file) or True)
    headers = {"authorization": f"Bearer {place.key}", "content-type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        leases = RemoteLeases(place, hello, session=session, watcher=watcher, max_attempts=max_attempts)
        try:
            yield leases
        finally:
            await leases.close()


def trusted(ca_file: Path | None) -> ssl.SSLContext | None:
    """The certificates in `ca_file`; None: those of the system. Raises `UserError`."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # `ssl.SSLError` is one
        hint = "give a file of certificates in PEM format"
        raise UserError(f"cannot read the certificates in `{ca_file}`: {error}", hint=hint) from error


def _pauses() -> Iterator[float]:
    for pause in PAUSES_S:
        yield pause * random.uniform(0.5, 1.0)
    while True:
        yield PAUSES_S[-1] * random.uniform(0.5, 1.0)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.errno > 0 and not isinstance(error, aiohttp.ClientSSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:  # a proxy's page, maybe, while the server behind it restarts
        raise Away(f"the answer is not LightningRL's: {error}") from error


def _problem(body: bytes) -> Problem:
    try:
        return msgspec.json.decode(body, type=Failure).error
    except msgspec.DecodeError:  # the page of a proxy
        return Problem()


def _refused(url: str, status: int, problem: Problem) -> UserError:
    message, _, hint = problem.message.partition("; hint: ")
    if not problem.code:
        return UserError(f"`{url}` answers with status {status}", hint="is this the address of a LightningRL server?")
    return UserError(message, hint=hint or "see docs/workers.md")
