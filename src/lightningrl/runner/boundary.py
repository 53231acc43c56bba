"""Calls user code, and attributes what it raises to the agent or to the grader."""

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from lightningrl.errors import AgentError, GraderError
from lightningrl.runner.wire import MAX_OUTPUT
from lightningrl.types import FINAL

MAX_TRACEBACK = 8000
"""Characters of a traceback that a record keeps: the last ones, which name the cause."""
ROUNDING = 1e-9
"""Tolerance, as a share of the range: parts of a reward that should add up to 1 may add up to slightly more."""
OURS = str(Path(__file__).parent)

Blame: TypeAlias = type[AgentError] | type[GraderError]


async def call(function: Callable[..., Any], *args: Any, threads: list[threading.Thread]) -> Any:
    """Call user code: `async def` in this event loop, anything else in a new thread, which is added to `threads`."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await function(*args)
    result = await _in_thread(function, *args, threads=threads)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[..., Any], *args: Any, threads: list[threading.Thread]) -> Any:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = copy_context()

    def end(result: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def body() -> None:
        try:
            result, error = context.run(function, *args), None
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything; raised again below
            result, error = None, raised
        loop.call_soon_threadsafe(end, result, error)

    thread = threading.Thread(target=body, daemon=True)
    threads.append(thread)
    thread.start()
    result, error = await ended
    if error is not None:
        raise error
    return result


@contextmanager
def attributed(blame: Blame) -> Iterator[None]:
    """Turn whatever user code raises in this block into a `blame`: a line that names the error, then the traceback."""
    try:
        yield
    except (blame, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # we cancelled it
        raise blame(describe(error)) from error


def describe(error: BaseException) -> str:
    """One line, then the traceback without our own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    summary = traceback.TracebackException(type(error), error, trace)
    message = str(summary).strip().splitlines() or [""]
    return (
        f"{type(error).__name__}: {message[0]}".removesuffix(": ") + "\n" + "".join(summary.format())[-MAX_TRACEBACK:]
    )


def as_json(output: Any) -> bytes:
    """The agent's answer as JSON, for the record and the grader. Raises `AgentError` if it is no JSON, or too large."""
    try:
        encoded = msgspec.json.encode(output)
    except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
        kind = f"{type(output).__module__}.{type(output).__qualname__}".removeprefix("builtins.")
        raise AgentError(
            f"the agent's answer, a `{kind}`, is not JSON: {error}",
            hint="return text, numbers, or lists and dicts of them (for a chat message: its `content`)",
        ) from error
    if len(encoded) > MAX_OUTPUT:
        raise AgentError(
            f"the agent's answer has {len(encoded)} bytes, more than `{MAX_OUTPUT}`",
            hint="write it to a file and return its path",
        )
    return encoded


def as_rewards(value: Any, *, within: tuple[float, float] | None = None) -> dict[str, float]:
    """Rewards by name. A number is the final reward; a mapping names several and must include `final`.

    `within`: the range of `final`; None allows any finite number. Raises `GraderError`.
    """
    found = value if isinstance(value, Mapping) else {FINAL: value}
    if FINAL not in found:
        raise GraderError(
            f"the reward function returned a dict without `{FINAL}`", hint=f"return a number, or a dict with `{FINAL}`"
        )
    rewards = {str(name): _number(v, name=str(name)) for name, v in found.items()}
    if within is not None:
        _check_range(rewards[FINAL], *within)
    return rewards


def _check_range(final: float, low: float, high: float) -> None:
    slack = ROUNDING * (high - low)
    if not low - slack <= final <= high + slack:
        hint = "fix the reward function, or widen `agent.reward_range`"
        raise GraderError(f"reward `{FINAL}` is `{final!r}`, outside its range `[{low:g}, {high:g}]`", hint=hint)


def _number(value: Any, *, name: str) -> float:
    hint = "the reward function must return a finite number; let it raise when it cannot tell"
    if value is None or isinstance(value, str | bytes):
        raise GraderError(f"reward `{name}` is `{value!r:.80}`, not a number", hint=hint)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise GraderError(f"reward `{name}` is a `{type(value).__name__}`, not a number", hint=hint) from error
    if not math.isfinite(number):
        raise GraderError(f"reward `{name}` is `{number}`", hint=hint)
    return number
