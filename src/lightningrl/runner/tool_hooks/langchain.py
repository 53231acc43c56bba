"""LangChain and LangGraph: `BaseTool.run` and `arun`, which every agent and `ToolNode` call.

A copy of the tool runs in its place, and returns the recorded text. So callbacks, events and traces stay as they are.
"""

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lightningrl.runner.patching import wrap
from lightningrl.runner.tool_hooks.asked import recorded
from lightningrl.tracing.tool_results import ToolResult

ARTIFACT = "the tool returns an artifact, too, which is not in the record"
COMMAND = "the tool returns a `Command`, which is not in the record"


def patch(module: ModuleType) -> None:
    """`module`: langchain_core.tools.base."""

    def playing(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_or_play(self: Any, tool_input: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> Any:
            arguments = tool_input if isinstance(tool_input, str | Mapping) else ""
            found = recorded(tool_call_id, name=self.name, arguments=arguments, unfit=_unfit(self), errors=True)
            tool = self if found is None else _stand_in(self, found, error=module.ToolException)
            return run(tool, tool_input, *args, tool_call_id=tool_call_id, **kwargs)  # a coroutine, if `run` is `arun`

        return run_or_play

    wrap(module.BaseTool, "run", playing)
    wrap(module.BaseTool, "arun", playing)


def _unfit(tool: Any) -> str:
    if tool.response_format == "content_and_artifact":
        return ARTIFACT
    functions = (tool.__dict__.get("func"), tool.__dict__.get("coroutine"))
    returned = [inspect.signature(function).return_annotation for function in functions if function is not None]
    return COMMAND if any("Command" in str(annotation) for annotation in returned) else ""


def _stand_in(tool: Any, found: ToolResult, *, error: type[Exception]) -> Any:
    def _run(*args: Any, **kwargs: Any) -> str | None:
        if found.failed:
            raise error(found.text)
        return found.text

    async def _arun(*args: Any, **kwargs: Any) -> str | None:
        return _run()

    copy = tool.model_copy(update={"handle_tool_error": True})
    copy.__dict__.update(_run=_run, _arun=_arun)
    return copy
