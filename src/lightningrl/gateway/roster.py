"""Which workers are connected, and what have they done? For the screen of the run and for `GET /workers`."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from lightningrl.remote.wire import Hello

AWAY_S = 20.0
"""A worker that neither waits for work nor was heard for so long is away. Busy ones are heard every five seconds."""
FORGOTTEN_S = 600.0
"""A worker that has been away for so long is taken off the list."""
RATE_S = 60.0
"""The rate counts the attempts of this many seconds."""
MOST = 10_000
"""Workers on the list. At this many, the one that was heard longest ago is taken off."""


@dataclass(slots=True, kw_only=True)
class Connected:
    """One worker, as the server has seen it."""

    hello: Hello
    since: float
    """Unix seconds of its first hello to this server."""
    heard_at: float
    """Monotonic clock, in seconds."""
    waiting: int = 0
    """Claims that wait for work."""
    running: int = 0
    """Attempts that it has."""
    succeeded: int = 0
    failed: int = 0
    lost: int = 0
    ends: deque[float] = field(default_factory=deque[float])
    """When the attempts of the last minute ended, on the monotonic clock."""

    @property
    def away(self) -> bool:
        return not self.waiting and time.monotonic() - self.heard_at > AWAY_S

    @property
    def per_minute(self) -> int:
        """Attempts that ended in the last minute."""
        while self.ends and self.ends[0] < time.monotonic() - RATE_S:
            self.ends.popleft()
        return len(self.ends)

    def ended(self, status: str) -> None:
        self.ends.append(time.monotonic())
        self.succeeded += status == "succeeded"
        self.lost += status == "lost"
        self.failed += status in ("failed", "timeout")

    def as_json(self) -> dict[str, Any]:
        """Without its id: whoever knows that and the worker key can finish its attempts."""
        return {
            "name": self.hello.name,
            "labels": list(self.hello.labels),
            "concurrency": self.hello.concurrency,
            "since": round(self.since, 3),
            "heard_s_ago": 0.0 if self.waiting else round(time.monotonic() - self.heard_at, 1),
            "away": self.away,
            "running": self.running,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "lost": self.lost,
            "per_minute": self.per_minute,
        }


class Roster:
    """The workers that have said hello to this server."""

    def __init__(self) -> None:
        self._workers: dict[str, Connected] = {}

    def admit(self, hello: Hello) -> None:
        now = time.monotonic()
        self._forget(now)
        known = self._workers.get(hello.worker)
        if known is None:
            self._workers[hello.worker] = Connected(hello=hello, since=time.time(), heard_at=now)
        else:
            known.hello, known.heard_at = hello, now

    def heard(self, worker: str) -> Connected | None:
        """The worker that sent a request; None: it has not said hello."""
        known = self._workers.get(worker)
        if known is not None:
            known.heard_at = time.monotonic()
        return known

    def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def all(self) -> list[Connected]:
        """Every worker on the list, in the order of the first hellos."""
        self._forget(time.monotonic())
        return list(self._workers.values())

    def present(self) -> list[Connected]:
        """Those that are not away."""
        return [worker for worker in self._workers.values() if not worker.away]

    def _forget(self, now: float) -> None:
        gone = [name for name, one in self._workers.items() if not one.waiting and now - one.heard_at > FORGOTTEN_S]
        if len(self._workers) >= MOST:
            gone.append(min(self._workers, key=lambda name: self._workers[name].heard_at))
        for name in gone:
            self._workers.pop(name, None)
