"""A gate for generations: closed, it holds back new ones; `pause` waits until the running ones have ended."""

import asyncio

from lightningrl.engine.base import still_running
from lightningrl.errors import EngineError


class Gate:
    """Open at first. Belongs to one event loop."""

    def __init__(self) -> None:
        self.inside = 0
        """Number of generations that have entered and not left."""
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._closed = False

    async def enter(self) -> None:
        """Wait until the gate is open, and enter. Every `enter` needs a `leave`."""
        while not (self._open.is_set() or self._closed):
            await self._open.wait()
        self.refuse_if_closed()
        self.inside += 1
        self._empty.clear()

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside:
            self._empty.set()

    async def pause(self, *, timeout_s: float) -> None:
        """Hold back new generations and wait until all have left. After a timeout it stays shut until `resume`."""
        self._open.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError as error:
            raise still_running(timeout_s) from error

    def resume(self) -> None:
        self._open.set()

    @property
    def drained(self) -> bool:
        return not self.inside and not self._open.is_set()

    def close(self) -> None:
        """Close for good. Waiting generations fail with an `EngineError`."""
        self._closed = True
        self._open.set()

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
