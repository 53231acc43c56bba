"""What do Ctrl-C, SIGTERM and SIGHUP do? The first signal ends a command in order, a second one ends the process at
once.

`main` listens as long as a command runs. `run` is for its event loop: what runs there is cancelled, so that it can
close what it has opened.
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
"""A signal that follows this soon is the same one: programs that started this one (make, uv) hand on what the terminal
has sent to all.
"""

T = TypeVar("T")


class Interrupted(BaseException):
    """A signal has come. Not an `Exception`: nothing on the way up is to take it for a failure of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        return 128 + self.signal


class _Listener:
    """The signals of this process."""

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
    """Listen to the signals, but for those that whoever started this process has it ignore (`nohup`). After a signal it
    goes on to the very end.
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
    """Run a coroutine in an event loop. Raises `Interrupted` if a signal has come, when all that was open in it is
    closed.
    """

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
    except (asyncio.CancelledError, OSError):  # a live display cannot write to a terminal that is gone
        if _listener.first is None:
            raise
        raise Interrupted(_listener.first) from None


def _leave(number: int) -> NoReturn:
    """Without a word to anything: workers notice by themselves. Only a cursor that a live display has hidden is shown
    again.
    """
    with suppress(OSError):
        os.write(2, (b"\x1b[?25h" if os.isatty(2) else b"") + b"\nstopped at once\n")
    os._exit(128 + number)
