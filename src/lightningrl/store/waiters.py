"""Wakes coroutines that wait for changes. `wake` runs on the writer thread, `register` on the event loops."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Waiters:
    """The coroutines that are waiting."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    @contextmanager
    def register(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done after the next `wake`. Register first, then read: so no change is missed."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._mutex:
            self._waiting.add(news)
        try:
            yield news
        finally:
            with self._mutex:
                self._waiting.discard(news)

    def wake(self) -> None:
        """Called after each commit that changed rollouts."""
        with self._mutex:
            for news in self._waiting:
                try:
                    news.get_loop().call_soon_threadsafe(_settle, news)
                except RuntimeError:  # its event loop was closed
                    continue


def _settle(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
