"""Which attempt blocks the event loop that a worker's attempts share? A thread asks the loop for a sign of life, and
notes who holds it up.

The note goes to a file that the pool has open too, as a blocked loop cannot send messages. Code that holds the GIL
stops the thread as well: then the block is seen when it is over, and nobody knows whose it was.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

BLOCKED_S = 1.0
"""A loop that gives no sign of life for this long is blocked."""
LOOK_S = 0.25
"""Between two looks."""
LENGTH = 1024
"""Bytes of a note, padded with spaces."""

running: ContextVar[str] = ContextVar("lightningrl_running", default="")
"""The job whose code runs; tasks that it starts inherit it."""
_owners: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()


class Watchdog:
    """Watches one loop from a thread of its own. `held_up` is called in the loop after each block, with (job id or "",
    seconds).
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, descriptor: int, *, held_up: Callable[[str, float], None]
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._held_up = held_up
        self._blocker = ""
        loop.set_task_factory(_make_task)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        while not self._loop.is_closed():
            sign = threading.Event()
            self._loop.call_soon_threadsafe(self._sign, sign, time.monotonic())
            if not sign.wait(BLOCKED_S):
                task = asyncio.current_task(self._loop)
                self._blocker = "" if task is None else _owners.get(task, "")
                _write(self._descriptor, self._blocker)
                sign.wait()
                _write(self._descriptor, None)
                self._blocker = ""
            time.sleep(LOOK_S)

    def _sign(self, sign: threading.Event, asked: float) -> None:
        """In the loop, before any timer that has run out meanwhile."""
        waited_s = time.monotonic() - asked
        if waited_s >= BLOCKED_S:
            self._held_up(self._blocker, waited_s)
        sign.set()


def read_note(descriptor: int) -> str | None:
    """The job that blocks the loop; "" if it is not known which, None if the loop is not blocked."""
    return msgspec.json.decode(os.pread(descriptor, LENGTH, 0) or b"null", type=str | None)


def _write(descriptor: int, note: str | None) -> None:
    os.pwrite(descriptor, msgspec.json.encode(note).ljust(LENGTH), 0)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    context = options.get("context")
    owner = running.get() if context is None else context.get(running, "")
    if owner:
        _owners[task] = owner
    return task
