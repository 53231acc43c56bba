"""One MCP server with the calculator for all agents of an event loop, restarted when it dies.

Starting a server takes as much CPU as about 150 calls, so no problem gets a server of its own. The list of tools is
fetched once: AutoGen asks for it before every answer and every call.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any, final
from weakref import WeakKeyDictionary

from anyio import BrokenResourceError, ClosedResourceError
from autogen_core import CancellationToken
from autogen_core.models import FunctionExecutionResult
from autogen_core.tools import TextResultContent, ToolResult, ToolSchema, Workbench
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams
from mcp import McpError

SERVER = Path(__file__).parent / "calculator.py"
TIMEOUT_S = 60.0
"""Timeout of the server; after it the server counts as dead."""
GONE = (McpError, ClosedResourceError, BrokenResourceError, RuntimeError, ExceptionGroup)
"""Errors of a dead server: the connection was closed or timed out, or its task has ended."""


UNFIT = "validation error"
"""From the server's message for bad arguments, which are the model's mistake. Any other error means that the calculator
itself has failed. An expression that cannot be evaluated is not an error.
"""
FAILED = "the calculator has failed: "


class CalculatorFailed(Exception):
    """The model read an error instead of the calculator's answer, so its final answer must not count."""


@final
class Calculator(Workbench):
    """The tools of one server.

    AutoGen turns every error into a tool's answer, and hangs if a workbench raises. So this workbench marks failures
    and remembers that its server has died; `check` raises.
    """

    def __init__(self) -> None:
        parameters = StdioServerParams(command=sys.executable, args=[str(SERVER)], read_timeout_seconds=TIMEOUT_S)
        self._server = McpWorkbench(parameters)
        self._tools: list[ToolSchema] = []
        self.failure: str | None = None
        """The error of a dead server; None while it lives."""

    def check(self, told: Sequence[FunctionExecutionResult]) -> None:
        """Raise `CalculatorFailed` if the server has died, or if one of these results is a failure."""
        if self.failure is not None:
            raise CalculatorFailed(f"the calculator's server has died: {self.failure}")
        for answer in told:
            if answer.is_error and answer.content.startswith(FAILED):
                raise CalculatorFailed(answer.content)

    async def start(self) -> None:
        await self._server.start()
        self._tools = await self._server.list_tools()

    async def stop(self) -> None:
        await self._server.stop()

    async def list_tools(self) -> list[ToolSchema]:
        return self._tools

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        if self.failure is not None:
            return ToolResult(name=name, result=[TextResultContent(content=self.failure)], is_error=True)
        result = await self._server.call_tool(name, arguments, cancellation_token, call_id)
        if not result.is_error or UNFIT in result.to_text():
            return result
        await self._look_after(result.to_text())
        return ToolResult(name=name, result=[TextResultContent(content=FAILED + result.to_text())], is_error=True)

    async def _look_after(self, error: str) -> None:
        """Tell a failed tool from a dead server: a living one lists its tools."""
        try:
            await self._server.list_tools()
        except GONE:
            if self.failure is None:
                self.failure = error.strip() or "no answer"
                await self._server.stop()

    async def reset(self) -> None:
        await self._server.reset()

    async def save_state(self) -> Mapping[str, Any]:
        return await self._server.save_state()

    async def load_state(self, state: Mapping[str, Any]) -> None:
        await self._server.load_state(state)


_running: WeakKeyDictionary[asyncio.AbstractEventLoop, "asyncio.Task[Calculator]"] = WeakKeyDictionary()


async def shared() -> Calculator:
    """The calculator of this event loop, started on first use. Raises the error of a failed start."""
    loop = asyncio.get_running_loop()
    starting = _running.get(loop)
    if starting is None or _is_lost(starting):
        starting = _running[loop] = loop.create_task(_started(), context=Context())  # in no task's context
    return await asyncio.shield(starting)


async def close() -> None:
    """End the server of this event loop, if there is one."""
    starting = _running.pop(asyncio.get_running_loop(), None)
    if starting is not None and not _is_lost(starting):
        await (await starting).stop()


async def _started() -> Calculator:
    calculator = Calculator()
    await calculator.start()
    return calculator


def _is_lost(starting: "asyncio.Task[Calculator]") -> bool:
    return starting.done() and (
        starting.cancelled() or starting.exception() is not None or starting.result().failure is not None
    )
