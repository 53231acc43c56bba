"""Which calculator does an agent use? One MCP server for all the agents of an event loop, and a fresh one as soon as it
has died.

To start a server takes as much CPU as some 150 calls of it, so none is started for a single problem. Its tools are
asked for once: AutoGen wants their list before every answer and every call.
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
"""A server that is this late with an answer counts as dead."""
GONE = (McpError, ClosedResourceError, BrokenResourceError, RuntimeError, ExceptionGroup)
"""What asking a dead server may raise: the connection was closed or timed out, or the task that held it has ended."""


UNFIT = "validation error"
"""In what a server says of arguments that do not fit: the model's mistake. Any other error says that the calculator
itself has failed; an expression that cannot be worked out is none.
"""
FAILED = "the calculator has failed: "


class CalculatorFailed(Exception):
    """What the model was told was not the calculator's answer, so nothing it said after can be held against it."""


@final
class Calculator(Workbench):
    """The tools of one server. AutoGen takes whatever goes wrong for the tool's answer, and waits for ever if a
    workbench raises; so this one marks what is no answer and remembers that its server has died, and whoever runs the
    agent asks for it: `check`.
    """

    def __init__(self) -> None:
        parameters = StdioServerParams(command=sys.executable, args=[str(SERVER)], read_timeout_seconds=TIMEOUT_S)
        self._server = McpWorkbench(parameters)
        self._tools: list[ToolSchema] = []
        self.failure: str | None = None
        """What the server's end looked like; None: it lives."""

    def check(self, told: Sequence[FunctionExecutionResult]) -> None:
        """Raise `CalculatorFailed` if the server has died, or has failed in one of the answers that a model was told."""
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
        """Was it the tool that failed, or the server? A server that lives lists its tools."""
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
    """The calculator of this event loop, started by whoever comes first. Raises what starting it raises."""
    loop = asyncio.get_running_loop()
    starting = _running.get(loop)
    if starting is None or _is_lost(starting):
        starting = _running[loop] = loop.create_task(_started(), context=Context())  # nobody's in particular
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
