"""Which attempt does this token belong to? Every request needs to know, so running attempts are kept in memory, by the
hash of their token. A hit touches no thread and no file.

An entry holds for one second after it was last confirmed. A read confirms it, and so does each commit of this store,
which checks whether another process has committed. An attempt that this store ends is dropped at the commit, also while
a read of it is under way.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from lightningrl.types import Attempt, Rollout

Found: TypeAlias = tuple[Rollout, Attempt]

TRUSTED_S = 1.0
"""Seconds that an entry holds without a check of the file."""

LIMIT = 4096
"""Attempts that are kept in memory. The others are read each time."""


@dataclass(slots=True, eq=False)
class _Read:
    """A read of the file that is under way."""

    began: float
    outdated: bool = False
    """The attempt has changed since, so the result may be old."""


class Running:
    """Running attempts by the hash of their token. Used from the event loops and the writer thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._entries: OrderedDict[str, tuple[float, Found]] = OrderedDict()
        self._reads: dict[str, set[_Read]] = {}
        """Reads under way, by the hash of the token."""
        self._confirmed_at = float("-inf")

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, hashed: str) -> Found | None:
        """The attempt; None: it has to be read from the file."""
        entry = self._entries.get(hashed)
        if entry is None or time.monotonic() - max(entry[0], self._confirmed_at) > TRUSTED_S:
            return None
        return entry[1]

    async def read(self, hashed: str, read: Callable[[], Awaitable[Found | None]]) -> Found | None:
        """Read the file with `read`, and keep the result if the attempt runs."""
        while True:
            mine = _Read(began=time.monotonic())
            with self._mutex:
                self._reads.setdefault(hashed, set()).add(mine)
            try:
                found = await read()
                with self._mutex:
                    if mine.outdated:
                        continue
                    if found is not None and found[1].status == "running":
                        self._keep(found, mine.began)
                return found
            finally:
                with self._mutex:
                    others = self._reads[hashed]
                    others.discard(mine)
                    if not others:
                        del self._reads[hashed]

    def add(self, found: Found) -> None:
        """An attempt has begun. Called at its commit."""
        with self._mutex:
            self._keep(found, time.monotonic())

    def drop(self, hashed: str) -> None:
        """An attempt has changed or ended."""
        with self._mutex:
            self._entries.pop(hashed, None)
            for read in self._reads.get(hashed, ()):
                read.outdated = True

    def confirm(self, at: float) -> None:
        """No other process had changed the file at this time of the monotonic clock."""
        self._confirmed_at = at

    def clear(self) -> None:
        """Another process has changed the file."""
        with self._mutex:
            self._entries.clear()
            for reads in self._reads.values():
                for read in reads:
                    read.outdated = True

    def _keep(self, found: Found, at: float) -> None:
        self._entries[found[1].token_hash] = (at, found)
        self._entries.move_to_end(found[1].token_hash)
        if len(self._entries) > LIMIT:
            self._entries.popitem(last=False)
