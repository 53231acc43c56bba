"""May a generation begin? A gate that holds back new ones, and knows when those that are inside have left."""

import asyncio

from lightningrl.errors import EngineError


class Gate:
    """Belongs to one event loop. Open at first."""

    def __init__(self) -> None:
        self.inside = 0
        """Generations that have entered and not left."""
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._closed = False

    async def enter(self) -> None:
        """Wait for the gate to open. Whoever has entered must `leave`."""
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
        """Let nobody in and wait until all have left. After a timeout it stays shut; `resume` opens it."""
        self._open.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError as error:
            raise EngineError(
                f"generations still run after `{timeout_s}` s", hint="wait longer, or lower `max_tokens`"
            ) from error

    def resume(self) -> None:
        self._open.set()

    @property
    def drained(self) -> bool:
        return not self.inside and not self._open.is_set()

    def close(self) -> None:
        """For good. Those that wait are refused."""
        self._closed = True
        self._open.set()

    def refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
