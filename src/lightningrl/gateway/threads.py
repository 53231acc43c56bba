"""What computes for long, off the event loop. Its threads do not keep the process from ending, as those of
`asyncio.to_thread` do.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` returns or raises, called in a thread of its own. A cancelled wait leaves the thread to itself."""
    loop, context = asyncio.get_running_loop(), copy_context()
    ended: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as raised:  # noqa: BLE001 - raised again by the waiting task
            tell(
                ended.set_exception,
                raised if isinstance(raised, Exception) else RuntimeError(f"`{type(raised).__name__}`: {raised}"),
            )
        else:
            tell(ended.set_result, result)

    def tell(settle: Callable[[Any], None], outcome: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(lambda: None if ended.done() else settle(outcome))

    threading.Thread(target=body, daemon=True, name="work").start()
    return await ended
