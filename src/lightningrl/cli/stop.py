"""Ctrl-C, SIGTERM and SIGHUP: the first signal ends a command in order, and a second one ends the process at once.

`main` listens while a command runs. `run` runs a coroutine and cancels it on a signal, so that it can close its files.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

import uvloop

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 1.0
"""A signal that follows sooner counts as the same one: make and uv forward a signal that the terminal sends to all."""

T = TypeVar("T")


class Interrupted(BaseException):
    """A signal has arrived. Not an `Exception`, so that no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        return 128 + self.signal


class _Listener:
    """The signal handler of this process."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.cancel: Callable[[], object] | None = None
        self._heard_at = 0.0

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self._heard_at = number, time.monotonic()
            if self.cancel is None:
                raise Interrupted(number)
            self.cancel()
        elif time.monotonic() - self._heard_at > REPEAT_S:
            _leave(number)


_listener = _Listener()


@contextmanager
def listening() -> Iterator[None]:
    """Handle signals while the block runs, except those that are ignored, as by `nohup`.

    After a signal, the handlers stay until the process ends.
    """
    heard = {number: signal.getsignal(number) for number in SIGNALS}
    heard = {number: handler for number, handler in heard.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, _listener.hear)
    try:
        yield
    finally:
        if _listener.first is None:
            for number, handler in heard.items():
                signal.signal(number, handler)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop. A signal cancels it; when it has ended, `Interrupted` is raised."""

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        _listener.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await main
        finally:
            _listener.cancel = None

    try:
        return uvloop.run(cancellable())
    except (asyncio.CancelledError, OSError):  # OSError: the terminal of a live display is closed
        if _listener.first is None:
            raise
        raise Interrupted(_listener.first) from None


@contextmanager
def instead(act: Callable[[], object]) -> Iterator[None]:
    """While the block runs, the first signal does not cancel the coroutine of `run`, but calls `act` in its event loop.

    A second signal ends the process at once, as always.
    """
    loop, before = asyncio.get_running_loop(), _listener.cancel
    _listener.cancel = lambda: loop.call_soon_threadsafe(act)
    try:
        yield
    finally:
        _listener.cancel = before


def _leave(number: int) -> NoReturn:
    """Exit without cleaning up, but show the cursor that a live display has hidden. Workers end by themselves."""
    with suppress(OSError):
        os.write(2, (b"\x1b[?25h" if os.isatty(2) else b"") + b"\nstopped at once\n")
    os._exit(128 + number)
