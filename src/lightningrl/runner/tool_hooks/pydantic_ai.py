"""PydanticAI: `call_tool` of the toolsets that hold functions, and of those of MCP servers.

A result that the record marks as an error is not played back: only the tool itself can raise its `ModelRetry` again.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightningrl.runner.patching import wrap
from lightningrl.runner.tool_hooks.asked import recorded


def patch_functions(module: ModuleType) -> None:
    """`module`: pydantic_ai.toolsets.function."""
    wrap(module.FunctionToolset, "call_tool", _playing)


def patch_mcp(module: ModuleType) -> None:
    """`module`: pydantic_ai.mcp."""
    wrap(module.MCPToolset, "call_tool", _playing)


def _playing(call_tool: Callable[..., Any]) -> Callable[..., Any]:
    async def call_or_play(self: Any, name: str, tool_args: dict[str, Any], ctx: Any, tool: Any) -> Any:
        found = recorded(ctx.tool_call_id, name=ctx.tool_name, arguments=tool_args)
        return await call_tool(self, name, tool_args, ctx, tool) if found is None else found.text

    return call_or_play
