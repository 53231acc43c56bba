"""AutoGen: the tool calls of an `AssistantAgent`, whatever its workbench, and `BaseTool.run_json` for other loops.

Handoffs run: they return a text that is part of the agent's code.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lightningrl.runner.patching import wrap
from lightningrl.runner.tool_hooks.asked import recorded


def patch_assistant(module: ModuleType) -> None:
    """`module`: autogen_agentchat.agents._assistant_agent."""

    def playing(execute: Callable[..., Any]) -> Callable[..., Any]:
        async def execute_or_play(tool_call: Any, workbench: Any, handoff_tools: Any, *args: Any, **kwargs: Any) -> Any:
            handoff = any(tool.name == tool_call.name for tool in handoff_tools)
            found = None
            if not handoff:
                found = recorded(tool_call.id, name=tool_call.name, arguments=tool_call.arguments, errors=True)
            if found is None:
                return await execute(tool_call, workbench, handoff_tools, *args, **kwargs)
            return tool_call, module.FunctionExecutionResult(
                content=found.text, call_id=tool_call.id, is_error=found.failed, name=tool_call.name
            )

        return execute_or_play

    wrap(module.AssistantAgent, "_execute_tool_call", playing)


def patch_tools(module: ModuleType) -> None:
    """`module`: autogen_core.tools._base."""

    def playing(run_json: Callable[..., Any]) -> Callable[..., Any]:
        async def run_or_play(
            self: Any, args: Mapping[str, Any], cancellation_token: Any, call_id: str | None = None
        ) -> Any:
            found = recorded(call_id, name=self.name, arguments=args)
            return await run_json(self, args, cancellation_token, call_id) if found is None else found.text

        return run_or_play

    wrap(module.BaseTool, "run_json", playing)
