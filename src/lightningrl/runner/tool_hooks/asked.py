"""The recorded result of a tool call of the running attempt."""

from collections.abc import Mapping
from typing import Any

from lightningrl.runner.attach import identity
from lightningrl.tracing.tool_results import ToolResult


def recorded(
    tool_call_id: str | None,
    *,
    name: str,
    arguments: str | Mapping[str, Any],
    unfit: str = "",
    errors: bool = False,
) -> ToolResult | None:
    """As `ToolPlayback.result`, for the attempt that the calling code belongs to. None without an attempt."""
    asker = identity.get()
    if asker is None or asker.tools is None:
        return None
    return asker.tools.result(tool_call_id, name=name, arguments=arguments, unfit=unfit, errors=errors)
