"""Whom to wake when rollouts have changed? `note` and `wake` run on the writer thread, the rest on the event loops."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Waiter:
    """One `wait` that is under way."""

    pending: set[str]
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    leave: Callable[["Waiter"], None]

    def forget(self, rollout_ids: Iterable[str]) -> None:
        self.pending.difference_update(rollout_ids)

    def __enter__(self) -> "Waiter":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(self)


class Waiters:
    """All that are under way."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiters: set[Waiter] = set()
        self._changed: list[str] = []

    def register(self, rollout_ids: Sequence[str]) -> Waiter:
        loop = asyncio.get_running_loop()
        waiter = Waiter(set(rollout_ids), loop.create_future(), loop, self._leave)
        with self._mutex:
            self._waiters.add(waiter)
        return waiter

    def note(self, rollout_id: str) -> None:
        self._changed.append(rollout_id)

    def wake(self) -> None:
        """Called after each commit. A waiter looks again, so that a false alarm (requeued, rolled back) does no harm."""
        if not self._changed:
            return
        with self._mutex:
            for waiter in self._waiters:
                try:
                    waiter.loop.call_soon_threadsafe(_settle, waiter, tuple(self._changed))
                except RuntimeError:  # its event loop was closed: nobody waits any more
                    continue
        self._changed.clear()

    def _leave(self, waiter: Waiter) -> None:
        with self._mutex:
            self._waiters.discard(waiter)


def _settle(waiter: Waiter, changed: tuple[str, ...]) -> None:
    waiter.forget(changed)
    if not waiter.pending and not waiter.future.done():
        waiter.future.set_result(None)
