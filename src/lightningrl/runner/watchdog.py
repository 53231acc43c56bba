"""Detects which attempt blocks the event loop that a worker's attempts share.

A thread pings the loop. If the loop does not answer, the thread writes the blocking attempt's id to a file that the
pool reads: a blocked loop cannot send messages. Code that holds the GIL stops the thread as well. Such a block is
noticed when it is over, and its cause stays unknown.
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
"""A loop that does not answer for this long is blocked."""
LOOK_S = 0.25
"""Interval between pings."""
LENGTH = 1024
"""Bytes of a note in the file, padded with spaces. A note is a job's id in JSON, or null."""

running: ContextVar[str] = ContextVar("lightningrl_running", default="")
"""Id of the job whose code runs; inherited by the tasks that it starts."""
_owners: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()


class Watchdog:
    """Watches one loop from a thread. After each block it calls `held_up(job id or "", seconds)` in the loop."""

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
            ping = threading.Event()
            self._loop.call_soon_threadsafe(self._answer, ping, time.monotonic())
            if not ping.wait(BLOCKED_S):
                task = asyncio.current_task(self._loop)
                self._blocker = "" if task is None else _owners.get(task, "")
                _write(self._descriptor, self._blocker)
                ping.wait()
                _write(self._descriptor, None)
                self._blocker = ""
            time.sleep(LOOK_S)

    def _answer(self, ping: threading.Event, sent_at: float) -> None:
        """Runs in the loop, before timers that expired during the block."""
        waited_s = time.monotonic() - sent_at
        if waited_s >= BLOCKED_S:
            self._held_up(self._blocker, waited_s)
        ping.set()


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
