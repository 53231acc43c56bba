"""Which earlier call is the base of a new one, i.e. the call that it is written as a difference to? Writer thread only.

    the call                                                        its base
    continues another call                                          that parent
    has no parent, repeats most of the attempt's latest call        the latest call (its history was rewritten)
    has no parent, begins like the first call of some attempt       that first call (same task, or same agent)
    else                                                            none

The memory for this is bounded. Everything in it follows from the file, so a forgotten part is read again.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from lightningrl.errors import StoreError
from lightningrl.prefix import common_prefix
from lightningrl.store.calls import add_kind, kind_key, read_content, read_ids
from lightningrl.store.connection import Connection
from lightningrl.store.delta import NOTHING, Content
from lightningrl.store.rows import the_attempt
from lightningrl.types import Call

CONTENT_LIMIT = 32 * 1024 * 1024
"""Bytes of calls that may become bases: mainly the latest calls of running attempts. 1,000 attempts with 8k tokens need
60 MB; a call that does not fit costs one read.
"""

ROOTS_LIMIT = 2 * 1024 * 1024
"""Bytes of first calls that other attempts may build on: 160 tasks in flight with 10 KB of system prompt and tools."""

BOOKS_LIMIT = 100_000
"""Running attempts, and call ids in them, that are kept in memory."""

KINDS_LIMIT = 4096

BEGINNINGS = (8192, 2048, 512, 128)
"""Number of first bytes of the prompt that make two first calls alike: 2,048 to 32 token ids."""

DEPTH = 2
"""Maximum number of bases behind the first call of an attempt. It bounds the cost of reading one attempt."""

K = TypeVar("K", bound=Hashable)


class Bounded(Generic[K]):
    """The most recent calls. Beyond `limit` bytes the least recently used ones are dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._contents: OrderedDict[K, tuple[int, Content]] = OrderedDict()
        self.size = 0

    def __contains__(self, key: K) -> bool:
        return key in self._contents

    def get(self, key: K) -> tuple[int, Content] | None:
        found = self._contents.get(key)
        if found is not None:
            self._contents.move_to_end(key)
        return found

    def put(self, key: K, seq: int, content: Content) -> None:
        self.drop(key)
        self._contents[key] = (seq, content)
        self.size += content.size
        while self.size > self._limit:
            self.drop(next(iter(self._contents)))

    def drop(self, key: K) -> None:
        found = self._contents.pop(key, None)
        if found is not None:
            self.size -= found[1].size

    def age(self, key: K) -> None:
        """Make this the first key to be dropped."""
        if key in self._contents:
            self._contents.move_to_end(key, last=False)


@dataclass(slots=True, kw_only=True)
class Book:
    """The calls of a running attempt."""

    seq: int
    """The attempt's row."""
    calls: dict[str, int] = field(default_factory=dict[str, int])
    """{call id: row}, in the order they were stored."""


class Recent:
    """Call `settle` after a commit, `forget` after a rollback: it drops what was remembered since the last commit."""

    def __init__(self) -> None:
        self._contents: Bounded[int] = Bounded(CONTENT_LIMIT)
        self._roots: Bounded[tuple[str, int]] = Bounded(ROOTS_LIMIT)
        self._books: OrderedDict[str, Book] = OrderedDict()
        self._known = 0
        self._kinds: dict[tuple[Hashable, ...], int] = {}
        self._unsettled: set[str] = set()
        """Attempts that began, were opened, or got calls since the last commit."""
        self._unsettled_roots: list[tuple[str, int]] = []
        self._unsettled_kinds: list[tuple[Hashable, ...]] = []

    @property
    def size(self) -> int:
        """Bytes of calls in memory."""
        return self._contents.size + self._roots.size

    def settle(self) -> None:
        self._unsettled.clear()
        self._unsettled_roots.clear()
        self._unsettled_kinds.clear()

    def forget(self) -> None:
        for attempt_id in self._unsettled:
            self.close(attempt_id)
        for root in self._unsettled_roots:
            self._roots.drop(root)
        for kind in self._unsettled_kinds:
            self._kinds.pop(kind, None)
        self.settle()

    def begin(self, attempt_id: str, seq: int) -> Book:
        """A book without calls, for the attempt in row `seq`."""
        self._unsettled.add(attempt_id)
        book = self._books[attempt_id] = Book(seq=seq)
        self._count(1)
        return book

    def book(self, connection: Connection, attempt_id: str) -> Book:
        """The calls of an attempt. Raises `StoreError` if there is no such attempt."""
        book = self._books.get(attempt_id)
        if book is None:
            return self._open(connection, attempt_id)
        self._books.move_to_end(attempt_id)
        return book

    def call(self, connection: Connection, attempt_id: str, call_id: str) -> int:
        """The row of a call. Raises `StoreError` if the attempt has no such call."""
        found = self.book(connection, attempt_id).calls.get(call_id)
        if found is None:  # another process may have added it
            found = self._open(connection, attempt_id).calls.get(call_id)
        if found is None:
            raise StoreError(f"attempt `{attempt_id}` has no call `{call_id}`")
        return found

    def close(self, attempt_id: str) -> None:
        """Forget an attempt that has ended. Only its first call may still become a base."""
        book = self._books.pop(attempt_id, None)
        if book is not None:
            self._known -= 1 + len(book.calls)
            for seq in book.calls.values():
                self._contents.drop(seq)

    def base(self, connection: Connection, call: Call, request: bytes) -> tuple[int | None, Content]:
        """(row, content) of the base of a call; (None, `NOTHING`) if no call is alike."""
        if call.parent_call_id is not None:
            seq = self.call(connection, call.attempt_id, call.parent_call_id)
            return seq, self._read(connection, seq)
        earlier = self.book(connection, call.attempt_id).calls
        if earlier:
            seq = next(reversed(earlier.values()))
            latest = self._read(connection, seq)
            if _repeats_most(call, request, latest):
                return seq, latest
        for root in _beginnings(call, request):
            found = self._roots.get(root)
            if found is not None:
                return found
        return None, NOTHING

    def keep(self, call: Call, seq: int, content: Content, *, base: int | None) -> None:
        """Remember a call that was stored in row `seq`."""
        self._books[call.attempt_id].calls[call.id] = seq
        self._count(1)
        self._unsettled.add(call.attempt_id)
        self._contents.put(seq, seq, content)
        if base is not None:
            self._contents.age(base)
        if call.parent_call_id is None and content.depth < DEPTH:
            for root in _beginnings(call, content.request):
                if root not in self._roots:
                    self._roots.put(root, seq, content)
                    self._unsettled_roots.append(root)

    def kind(self, connection: Connection, call: Call, name: str) -> int:
        """The row of this call's kind: the fields that it shares with many calls."""
        key = kind_key(call, name)
        found = self._kinds.get(key)
        if found is None:
            if len(self._kinds) >= KINDS_LIMIT:
                self._kinds.clear()
            found = self._kinds[key] = add_kind(connection, call, name)
            self._unsettled_kinds.append(key)
        return found

    def _open(self, connection: Connection, attempt_id: str) -> Book:
        self.close(attempt_id)
        book = self.begin(attempt_id, the_attempt(connection, attempt_id).seq)
        book.calls.update((call_id, seq) for seq, call_id in read_ids(connection, book.seq, attempt_id).items())
        self._count(len(book.calls))
        return book

    def _count(self, more: int) -> None:
        """Count attempts and calls in memory. The least recently used attempts are forgotten, never the last one."""
        self._known += more
        while self._known > BOOKS_LIMIT and len(self._books) > 1:
            self.close(next(iter(self._books)))

    def _read(self, connection: Connection, seq: int) -> Content:
        found = self._contents.get(seq)
        if found is not None:
            return found[1]
        content = read_content(connection, seq, {})
        self._contents.put(seq, seq, content)
        return content


def _beginnings(call: Call, request: bytes) -> Iterator[tuple[str, int]]:
    """Keys under which similar first calls are found, the longest beginning first: of the prompt ids or, without them,
    of the request. If two hashes collide, the base is a poor one, but never a wrong one.
    """
    text = call.prompt_ids.tobytes() or request
    yield call.dialect, hash(text)
    for length in BEGINNINGS:
        if length < len(text):
            yield call.dialect, hash(text[:length])


def _repeats_most(call: Call, request: bytes, latest: Content) -> bool:
    """Does the call share at least half of its prompt (or request) with `latest`?"""
    if len(call.prompt_ids):
        return 2 * common_prefix(latest.ids, call.prompt_ids) >= len(call.prompt_ids)
    return 2 * common_prefix(np.frombuffer(latest.request, np.uint8), np.frombuffer(request, np.uint8)) >= len(request)
