"""Runs long computations off the event loop, in daemon threads: `asyncio.to_thread` would delay the process's exit."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in a new thread; returns or raises as it does. If cancelled, the thread runs on unobserved."""
    loop, context = asyncio.get_running_loop(), copy_context()
    ended: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again by the waiting task
            tell(ended.set_exception, error)
        except BaseException as error:  # noqa: BLE001 - `SystemExit` must not end the server
            tell(ended.set_exception, RuntimeError(f"`{type(error).__name__}`: {error}"))
        else:
            tell(ended.set_result, result)

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(lambda: None if ended.done() else settle(outcome))

    threading.Thread(target=body, daemon=True, name="work").start()
    return await ended
