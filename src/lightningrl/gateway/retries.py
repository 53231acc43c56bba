"""Is this the same request once more? An SDK repeats a request whose answer it has not got, and says so in a header.

Requests that merely look alike are resamples, and each is answered afresh. A repetition is given the answer of the
request that it repeats: one that was ready when its client had already gone, that is still being sampled, or that has
just been written to a connection which, as it seems, nobody read (if there is but one such: of several look-alikes,
whose it was cannot be told). If the first try came to nothing (it was refused, it broke, or it was given up when its
client went) the repetition is new: it must not be taken for that of a look-alike.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightningrl.dialects.base import Reply

KEPT = 64
"""Bodies of one attempt whose answers nobody has fetched, or that got none; a repetition comes within seconds."""
WRITTEN_S = 5.0
"""A repetition comes within this time: SDKs wait for 0.5 to 2 s before their first."""


@dataclass(slots=True, eq=False, kw_only=True)
class Answering:
    """One request that is being answered, and those who wait for it."""

    work: "asyncio.Task[Any]"
    """Comes to what `Delivery.give` takes."""
    begun: Reply
    """What is known of the answer from the start."""
    sampled: Callable[[], bool]
    """Is nothing left to do but to record it?"""
    readers: int = 1
    """Clients that are still there."""

    @property
    def useful(self) -> bool:
        """There is an answer, or there will be."""
        work = self.work
        return not work.cancelling() and not (
            work.done() and (work.cancelled() or work.exception() or not self.sampled())
        )

    def leave(self) -> None:
        """A client has gone. Nobody left: what is still being sampled is given up, which frees the engine."""
        self.readers -= 1
        if not self.readers and not self.sampled():
            self.work.cancel()


@dataclass(slots=True)
class Unread:
    """Requests of one attempt whose answers have not been delivered yet, by what was asked."""

    _waiting: dict[bytes, list[Answering]] = field(default_factory=dict)
    _failed: Counter[bytes] = field(default_factory=Counter)
    """How many came to nothing, and have not been repeated yet."""
    _written: deque[tuple[float, bytes, Answering]] = field(default_factory=lambda: deque(maxlen=8))
    """When which answer was written, for `WRITTEN_S`."""

    def begin(
        self, digest: bytes, work: "asyncio.Task[Any]", *, begun: Reply, sampled: Callable[[], bool]
    ) -> Answering:
        answering = Answering(work=work, begun=begun, sampled=sampled)
        self._waiting.setdefault(digest, []).append(answering)
        return answering

    def join(self, digest: bytes) -> Answering | None:
        """For a repetition: the request that it repeats. None: it is to be answered afresh."""
        found = min((a for a in self._waiting.get(digest, ()) if a.useful), key=lambda a: a.readers, default=None)
        if self._failed[digest] and (found is None or found.readers):
            self._failed[digest] -= 1
            return None
        found = found or self._just_written(digest)
        if found is not None:
            found.readers += 1
        return found

    def delivered(self, digest: bytes, answering: Answering) -> None:
        answering.sampled = _done  # lets go of all that it took to make the answer
        self._written.append((time.monotonic(), digest, answering))
        asyncio.get_running_loop().call_later(WRITTEN_S, self._expire)
        self._forget(digest, answering)

    def _just_written(self, digest: bytes) -> Answering | None:
        found = {id(answering): answering for _, written, answering in self._written if written == digest}
        return next(iter(found.values())) if len(found) == 1 else None

    def _expire(self) -> None:
        until = time.monotonic() - WRITTEN_S
        while self._written and self._written[0][0] <= until:
            self._written.popleft()

    def _forget(self, digest: bytes, answering: Answering) -> None:
        found = self._waiting.get(digest, [])
        if answering in found:
            found.remove(answering)
        if not found:
            self._waiting.pop(digest, None)

    def missed(self, digest: bytes, answering: Answering) -> None:
        """The client went away, or heard of a failure. What is ready, or nearly so, is kept for it."""
        answering.leave()
        if not answering.useful:
            self._forget(digest, answering)
            self.failed(digest)
        elif len(self._waiting) > KEPT:
            del self._waiting[next(iter(self._waiting))]

    def failed(self, digest: bytes) -> None:
        """The client gets no answer to this, and may try again."""
        self._failed[digest] += 1
        if len(self._failed) > KEPT:
            del self._failed[next(iter(self._failed))]


def _done() -> bool:
    return True
