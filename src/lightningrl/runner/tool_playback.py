"""May this tool run in a branch, or is its recorded result played back? The answer to each tool call of an attempt."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from lightningrl.arguments import arguments_key
from lightningrl.branches import VOID
from lightningrl.tracing.tool_results import NO_ID, Recorded, ToolResult

FAILED = "the record marks it as an error, which only the tool can raise here"


class ToolWithheld(BaseException):
    """A tool must not run a second time. This is no `Exception`, since frameworks turn those into a tool's result, and
    the agent would go on.
    """


class ToolPlayback:
    """The recorded tool results of one attempt. Tools may ask from several threads."""

    def __init__(self, recorded: Recorded) -> None:
        self.mode: Final = recorded.tools
        self.withheld = ""
        """Why the attempt is void: a tool that must not run again would have run. "": none."""
        self.on_withheld: Callable[[], None] = lambda: None
        """Called once, when the first tool is withheld; in that tool's thread."""
        self._results = recorded.results
        self._by_id = {result.id: result for result in recorded.results if result.id}
        self._played = 0

    def result(
        self,
        tool_call_id: str | None,
        *,
        name: str = "",
        arguments: str | Mapping[str, Any] = "",
        unfit: str = "",
        errors: bool = False,
    ) -> ToolResult | None:
        """The result to play back; None: the tool runs. Raises `ToolWithheld`.

        `name` and `arguments`: for tool calls that the record knows by these alone. "": unknown.
        `unfit`: why no text can stand for the result of this tool; "": one can.
        `errors`: the caller can mark the result as an error, as the record does.
        """
        found = self._by_id.get(tool_call_id or "")
        if found is None:
            self._check_unknown(tool_call_id, name=name, arguments=arguments)
            return None
        why = found.missing or unfit or (FAILED if found.failed and not errors else "")
        if not why:
            self._played += 1
            return found
        if self.mode == "never":
            raise self._withhold(found, why=why)
        return None

    def why_void(self, *, succeeded: bool) -> str | None:
        """Why the attempt that has ended is void, beginning with `VOID`; None if its tools are no reason."""
        if self.withheld:
            return f"{VOID}{self.withheld}"
        recorded = sum(result.text is not None for result in self._results)
        if succeeded and self.mode == "never" and recorded and not self._played:
            return f"{VOID}none of `{recorded}` recorded tool results was asked for, so the tools may have run again"
        return None

    def _check_unknown(self, tool_call_id: str | None, *, name: str, arguments: str | Mapping[str, Any]) -> None:
        """A tool call with an id that the record does not have is new. But it may be one that the record does not
        identify, or the framework may not tell the id.
        """
        if self.mode != "never" or not name:
            return
        key = _key(arguments)
        for result in self._results:
            unsure = not tool_call_id or result.text is None
            if unsure and result.name == name and arguments_key(result.arguments) == key:
                raise self._withhold(result, why=result.missing or NO_ID)

    def _withhold(self, result: ToolResult, *, why: str) -> ToolWithheld:
        message = f"tool `{result.name}` must not run again, and its result cannot be played back: {why}"
        if not self.withheld:
            self.withheld = message
            self.on_withheld()
        return ToolWithheld(message)


NOTHING = ToolPlayback(Recorded())
"""All tools run."""


def _key(arguments: str | Mapping[str, Any]) -> str:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments, enc_hook=str).decode()
    return arguments_key(text)
