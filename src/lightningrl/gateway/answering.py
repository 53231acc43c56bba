"""Answers in the making: which clients wait for each, and which answer may a repeated request have?

An SDK that gets no answer repeats its request, and says so in a header. Identical requests without that header are
resamples, and each is sampled afresh. A repeated request gets the answer of the request that it repeats. That answer
may still be in the making, may have been ready when its client had gone, or may just have been written to a connection
that broke. A written answer is given again only if there is just one: of several, the lost one is unknown. If the
first try was refused, broke or was given up, the repetition is sampled afresh; it must not get a resample's answer.

A client may name its request (`identity.REQUEST`), as a worker's relay does. Then all of this is certain: the name
finds the answer, and nothing is sampled twice. A broken connection does not stop the sampling of such a request, since
its client comes back; `Unread.abandon` does.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from lightningrl.gateway import http
from lightningrl.gateway.delivery import Delivery
from lightningrl.gateway.http import Receive, Send
from lightningrl.gateway.refusals import ENDED, GONE, abandoned, is_shutdown, refusal_of

KEEP_ALIVE_S = 10.0
"""A stream is never silent for longer: proxies and clients time out after 30 to 60 s. As often, an answer in the making
checks whether its attempt still runs.
"""
KEPT = 64
"""Requests of one attempt that are remembered without a delivered answer; a repetition comes within seconds."""
WRITTEN_S = 5.0
"""Written answers are kept for this time: SDKs wait for 0.5 to 2 s before they first repeat a request."""


class Work(Protocol):
    """Makes one answer. `capture.Exchange` samples it, `relay.Relay` gets it from another server."""

    @property
    def delivery(self) -> Callable[[Send], Delivery]:
        """Makes the delivery of this answer to one client."""
        ...

    def sampled(self) -> bool:
        """Only recording is left to do."""
        ...

    async def run(self, delivery: Any) -> Any:
        """Returns the argument of `Delivery.give`. `delivery` is that of the first client, which may follow live."""
        ...


class Answering:
    """One answer in the making, and the clients that wait for it."""

    def __init__(self, unread: "Unread", digest: bytes, work: Work, delivery: Delivery) -> None:
        self.digest = digest
        self.delivery = work.delivery
        self.names: list[str] = []
        """The names of its requests."""
        self.readers = 1
        """Clients that are still connected, or have named their request."""
        self._unread = unread
        self._sampled = work.sampled
        self._task = asyncio.ensure_future(work.run(delivery))

    @property
    def useful(self) -> bool:
        """There is an answer, or there will be."""
        task = self._task
        if task.cancelling():
            return False
        return not task.done() or not (task.cancelled() or task.exception() or not self._sampled())

    @property
    def ready(self) -> bool:
        return self._task.done()

    async def hand_over(
        self, delivery: Delivery, receive: Receive, *, request_id: str, check: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait for the answer and send it to one client. Raises `Refused` if it fails before anything was sent.

        If the client goes away first, and no other waits, sampling is given up and recorded as far as it came. A client
        that has named its request comes back instead. `check` raises `Refused` if the attempt has ended.
        """
        gone = asyncio.ensure_future(http.disconnected(receive))
        delivered, why = False, GONE
        try:
            with self._unread.serving(request_id):
                await self._wait(gone, delivery, check, comes_back=bool(request_id))
            if not gone.done():
                await delivery.give(self._task.result())
                delivered = self.useful and not gone.done()
        except (Exception, asyncio.CancelledError) as error:
            why = ENDED if is_shutdown(error) else GONE
            if request_id and is_shutdown(error):
                raise  # also in the middle of a stream: the client asks the next server
            await delivery.fail(refusal_of(error))  # in its own dialect
        finally:
            gone.cancel()
            if delivered:
                self._sampled = _done  # frees the work and all that it holds
                self._unread.delivered(self)
            else:
                await self._leave(why)

    async def _wait(
        self,
        gone: "asyncio.Future[None]",
        delivery: Delivery,
        check: Callable[[], Awaitable[None]],
        *,
        comes_back: bool,
    ) -> None:
        while not self._task.done() and (comes_back or not gone.done()):
            awaited = (self._task,) if gone.done() else (self._task, gone)
            await asyncio.wait(awaited, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if not (self._task.done() or gone.done()):
                await delivery.keep_alive()
            if not self._task.done():
                await check()

    async def _leave(self, why: str) -> None:
        """A client has no answer. The last one that leaves stops the sampling, which frees the engine."""
        task = self._task
        self.readers -= 1
        if not self.readers and not self._sampled():
            task.cancel(why)
        self._unread.missed(self)
        if self.readers or task.done():
            return
        await asyncio.wait((task,))  # it is being recorded
        if not task.cancelled() and (error := task.exception()) is not None:
            refusal_of(error)  # no client is left to get the error, but a bug is logged


@dataclass(slots=True)
class Unread:
    """Answers of one attempt that have not reached their clients, by the digest of the request."""

    _waiting: dict[bytes, list[Answering]] = field(default_factory=dict)
    _named: dict[str, Answering] = field(default_factory=dict)
    """Those of `_waiting` with named requests, by these names."""
    _failed: Counter[bytes] = field(default_factory=Counter)
    """How many requests got no answer, and have not been repeated yet."""
    _written: deque[tuple[float, Answering]] = field(default_factory=lambda: deque(maxlen=8))
    """Answers that were written within the last `WRITTEN_S`, and when."""
    _turns: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """Locks of `turn`, by the name of the request."""
    _serving: dict[str, set["asyncio.Task[Any]"]] = field(default_factory=dict)
    """What waits for an answer, by the name of the request."""
    _abandoned: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    """The names of requests that were given up."""

    @asynccontextmanager
    async def turn(self, request_id: str) -> AsyncIterator[None]:
        """Only one request of each name may look for its answer, or begin it. Raises `Refused` if it was given up."""
        lock = self._turns.setdefault(request_id, asyncio.Lock())
        async with lock:
            self.check(request_id)
            yield

    def named(self, request_id: str) -> Answering | None:
        """The answer to the request of this name, if it is in memory."""
        found = self._named.get(request_id)
        if found is None or not found.useful:
            return None
        found.readers += 1
        return found

    def begin(self, digest: bytes, work: Work, delivery: Delivery, *, request_id: str) -> Answering:
        """Start to make an answer. Raises `Refused` if the request was given up meanwhile."""
        self.check(request_id)
        answering = Answering(self, digest, work, delivery)
        self._waiting.setdefault(digest, []).append(answering)
        self._name(answering, request_id)
        return answering

    def join(self, digest: bytes, *, request_id: str) -> Answering | None:
        """The answer for a repeated request. None: it must be sampled afresh."""
        useful = [answering for answering in self._waiting.get(digest, ()) if answering.useful]
        found = min(useful, key=lambda answering: answering.readers, default=None)
        if self._failed[digest] and (found is None or found.readers):
            self._failed[digest] -= 1
            return None
        found = found or self._just_written(digest)
        if found is not None:
            found.readers += 1
            self._name(found, request_id)
        return found

    async def abandon(self, request_id: str) -> None:
        """The agent that made the request of this name is gone. Returns when its sampling has been given up."""
        self._abandoned.append(request_id)
        tasks = list(self._serving.get(request_id, ()))
        for task in tasks:
            task.cancel(GONE)
        if tasks:
            await asyncio.wait(tasks)

    @contextmanager
    def serving(self, request_id: str) -> Iterator[None]:
        """`abandon` cancels the current task while the block runs."""
        task = asyncio.current_task()
        if not request_id or task is None:
            yield
            return
        tasks = self._serving.setdefault(request_id, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._serving.pop(request_id, None)

    def delivered(self, answering: Answering) -> None:
        self._written.append((time.monotonic(), answering))
        asyncio.get_running_loop().call_later(WRITTEN_S, self._expire)
        self._forget(answering)

    def missed(self, answering: Answering) -> None:
        """A client got no answer. One that is ready, or nearly so, is kept for a repetition."""
        if not answering.useful:
            self._forget(answering)
            self.failed(answering.digest)
        elif len(self._waiting) > KEPT:
            every = (answering for answerings in self._waiting.values() for answering in answerings)
            oldest = next((answering for answering in every if answering.ready), None)
            if oldest is not None:
                self._forget(oldest)

    def failed(self, digest: bytes) -> None:
        """A request gets no answer, and may be repeated."""
        self._failed[digest] += 1
        if len(self._failed) > KEPT:
            del self._failed[next(iter(self._failed))]

    def _name(self, answering: Answering, request_id: str) -> None:
        if request_id:
            self._named[request_id] = answering
            answering.names.append(request_id)

    def check(self, request_id: str) -> None:
        """Raises `Refused` if the request of this name was given up."""
        if request_id and request_id in self._abandoned:
            raise abandoned()

    def _just_written(self, digest: bytes) -> Answering | None:
        found = {answering for _, answering in self._written if answering.digest == digest}
        return found.pop() if len(found) == 1 else None

    def _expire(self) -> None:
        until = time.monotonic() - WRITTEN_S
        while self._written and self._written[0][0] <= until:
            self._written.popleft()

    def _forget(self, answering: Answering) -> None:
        found = self._waiting.get(answering.digest, [])
        if answering in found:
            found.remove(answering)
        if not found:
            self._waiting.pop(answering.digest, None)
        for request_id in answering.names:
            self._named.pop(request_id, None)


def _done() -> bool:
    return True
