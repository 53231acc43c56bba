"""What did the tools of a trunk answer? Their results by tool call id, for a branch that plays them back.

The request after a tool call has the tool's result, whatever the agent's framework. So no telemetry is needed:

    call   answer requests            request of a later call brings     result
    c1     pay (call_1)                                                  call_1: "paid 5 €"
    c2     pay (call_2)               call_1: "paid 5 €"                 call_2: none, the attempt ended

Only tool calls of answers that the branch plays back count. Those of the branching call and of its consequences are
new in the branch, and have other ids.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from lightningrl.branches import played_back
from lightningrl.dialects.recorded import Reader
from lightningrl.messages import Message, ToolCall
from lightningrl.types import Branch, Call

Tools: TypeAlias = Literal["rerun", "safe", "never"]
"""The setting `replay.tools`."""
NO_ID = "the record has no id for this tool call, or the same one for several"
NOT_IN_A_REQUEST = "its result is not in the record: no later request of the attempt has it as text"
CALLED_A_MODEL = "the agent began a conversation with a model while the tool ran, maybe inside it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """A tool call of the trunk, and its result."""

    id: str
    """Of the tool call. "" if it does not identify the tool call."""
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    text: str | None
    """The result as the model read it; None if it cannot be played back."""
    failed: bool = False
    """The request marks the result as an error, as those of `anthropic.messages` do."""
    missing: str = ""
    """Why there is no text; "" if there is."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway tells a branch's attempt: `GET /replay/tools`."""

    tools: Tools = "rerun"
    results: list[ToolResult] = []
    """Empty with `rerun`, and for an attempt that is no branch."""


def tool_results(trunk: Sequence[Call], branch: Branch) -> list[ToolResult]:
    """The tool calls that the branch's played-back answers request, in order. `trunk`: all calls of the attempt."""
    record = _Record(trunk)
    kept = {call.id for call in played_back(trunk, branch)}
    return [record.result(call, tool_call) for call, tool_call in record.asked if call.id in kept]


@dataclass(frozen=True, slots=True)
class _Brought:
    """A tool's result, and the first request that has it."""

    message: Message
    by: Call


class _Record:
    """What one attempt says about its tool calls."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = sorted(calls, key=lambda call: call.index)
        self.asked: list[tuple[Call, ToolCall]] = []
        """Complete calls with the tool calls of their answers."""
        self._brought: dict[str, _Brought] = {}
        reader = Reader()
        for call in self._calls:
            request, answer = reader.request(call), reader.answer(call)
            for message in () if request is None else request.messages:
                if message.role in ("tool", "function") and message.tool_call_id:
                    self._brought.setdefault(message.tool_call_id, _Brought(message, call))
            if answer is not None and call.capture != "incomplete":
                self.asked += [(call, tool_call) for tool_call in answer.tool_calls]
        self._ids: Mapping[str, int] = Counter(tool_call.id for _, tool_call in self.asked)

    def result(self, call: Call, tool_call: ToolCall) -> ToolResult:
        known = bool(tool_call.id) and self._ids[tool_call.id] == 1
        brought = self._brought.get(tool_call.id) if known else None
        missing = NO_ID if not known else self._missing(call, brought)
        return ToolResult(
            id=tool_call.id if known else "",
            name=tool_call.name,
            arguments=tool_call.arguments,
            text=None if brought is None or missing else brought.message.content,
            failed=brought is not None and brought.message.failed,
            missing=missing,
        )

    def _missing(self, call: Call, brought: _Brought | None) -> str:
        if brought is None:
            return NOT_IN_A_REQUEST
        return CALLED_A_MODEL if any(self._begun_between(call, brought.by)) else ""

    def _begun_between(self, call: Call, last: Call) -> Iterator[bool]:
        """Whether each call begins a conversation after `call` has ended, and ends before `last` begins."""
        for other in self._calls:
            within = call.ended_at <= other.started_at and other.ended_at <= last.started_at
            yield within and other.parent_call_id is None and other.id not in (call.id, last.id)
