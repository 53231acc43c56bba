"""OpenAI Agents SDK: the function that invokes a `FunctionTool`, also those of MCP servers.

A copy of the tool is invoked in its place. So guardrails, hooks and traces stay as they are.
"""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightningrl.runner.patching import wrap
from lightningrl.runner.tool_hooks.asked import recorded

SCHEMA = "the tool has an output schema"


def patch(module: ModuleType) -> None:
    """`module`: agents.run_internal.tool_execution."""

    def playing(invoke: Callable[..., Any]) -> Callable[..., Any]:
        async def invoke_or_play(*, function_tool: Any, context: Any, arguments: str) -> Any:
            return await invoke(
                function_tool=_played(function_tool, context, arguments), context=context, arguments=arguments
            )

        return invoke_or_play

    wrap(module, "_invoke_function_tool_with_metadata", playing)


def _played(tool: Any, context: Any, arguments: str) -> Any:
    """The tool, or a copy of it that returns the recorded text. An agent as a tool runs: its own tools are asked."""
    if tool._is_agent_tool:
        return tool
    unfit = SCHEMA if tool.output_json_schema is not None else ""
    found = recorded(context.tool_call_id, name=context.tool_name, arguments=arguments, unfit=unfit)
    if found is None:
        return tool

    async def play(context: Any, arguments: str) -> str | None:
        return found.text

    stand_in = copy.copy(tool)
    stand_in.on_invoke_tool = play
    return stand_in
