"""Tells browsers that a run has changed, by server-sent events. One task looks at a run for all who watch it.

Without anybody who watches, nothing looks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

from lightningrl.errors import LightningError
from lightningrl.look.runs import state_of
from lightningrl.ui.shelf import Book

EVERY_S = 2.0
"""Seconds between two looks at a run, and between two events. Each costs the machine of the run some ms of CPU."""
ALIVE_S = 15.0
"""Seconds of silence after which an empty line is sent: so a connection that was cut is noticed."""


class Watch:
    """Looks at one run, and keeps what it last saw."""

    def __init__(self, find: Callable[[], Book]) -> None:
        """`find`: the run as it is now; it may be deleted, and started again in the same folder."""
        self._find = find
        self._changed = asyncio.Condition()
        self._number = 0
        self._seen: dict[str, Any] = {}
        self.viewers = 0
        self.task: asyncio.Task[None] | None = None

    def enter(self) -> None:
        self.viewers += 1
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._look())

    def leave(self) -> None:
        self.viewers -= 1
        if not self.viewers and self.task is not None:
            self.task.cancel()
            self.task = None

    async def after(self, number: int) -> tuple[int, dict[str, Any]]:
        """(number, what was seen) as soon as something later than `number` was seen."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._number > number)
            return self._number, self._seen

    async def _look(self) -> None:
        while True:
            with suppress(LightningError, OSError):  # the database or the folder is away: look again
                await self._tell(await self._state())
            await asyncio.sleep(EVERY_S)

    async def _tell(self, seen: dict[str, Any]) -> None:
        if seen != self._seen:
            async with self._changed:
                self._number, self._seen = self._number + 1, seen
                self._changed.notify_all()

    async def _state(self) -> dict[str, Any]:
        book, cursor = self._find(), None
        if book.has_records:
            cursor = (await (await book.opened()).records.changes()).cursor
        return {"metrics": book.metrics.after().cursor, "rollouts": cursor, "state": state_of(book.folder)}


class Live:
    """The streams of all runs."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}
        self._closed = asyncio.Event()

    @property
    def viewers(self) -> int:
        return sum(watch.viewers for watch in self._watches.values())

    def stream(self, name: str, find: Callable[[], Book]) -> StreamingResponse:
        """Tell of changes of the run with this name. `find`: see `Watch`."""
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(name, find), media_type="text/event-stream", headers=headers)

    def close(self) -> None:
        """End all streams."""
        self._closed.set()

    async def _events(self, name: str, find: Callable[[], Book]) -> AsyncIterator[bytes]:
        """Ends if the task that looks has failed: browsers come again, and then another one looks."""
        watch = self._watches.setdefault(name, Watch(find))
        watch.enter()
        number, closed = 0, asyncio.ensure_future(self._closed.wait())
        try:
            while not closed.done() and watch.task is not None and not watch.task.done():
                change = asyncio.ensure_future(watch.after(number))
                await asyncio.wait((change, closed, watch.task), timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if change.done():
                    number, seen = change.result()
                    yield b"event: change\ndata: " + msgspec.json.encode(seen) + b"\n\n"
                elif change.cancel():
                    yield b": still here\n\n"
        finally:
            closed.cancel()
            watch.leave()
