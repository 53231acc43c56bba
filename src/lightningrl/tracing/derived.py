"""Which spans follow from the calls alone? One for each call, and one for each tool call whose result a later request
of the attempt brings.

Every agent has this source: it needs no telemetry, only further requests to the model.

    call   answer requests            request of a later call brings     span
    c1     weather (call_1)                                              llm c1
    c2                                call_1: "21 °C"                    tool weather, caused by c1, then llm c2

A history repeats its results with every request; each counts once. A malformed tool call (its arguments are no JSON
object, or a tool call was begun and cannot be parsed) is a span with an error, with or without a result.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightningrl.arguments import arguments_key, malformed
from lightningrl.dialects.recorded import Reader
from lightningrl.messages import Message, ToolCall
from lightningrl.tracing.failure import failure_of
from lightningrl.types import Call, Span, by_attempt

TOOL_CALL_ID = "gen_ai.tool.call.id"
EXCEPTION_TYPE = "exception.type"
MALFORMED = "lightningrl.malformed"
"""True: the tool call's arguments are no JSON object."""
BEGUN = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\A\s*\[?\s*\{\s*\"name\"\s*:")
"""The start of a tool call. An answer that has it, but no tool call, has one that could not be parsed."""
NAME = re.compile(r"\"name\"\s*:\s*\"([^\"]+)\"")


def spans_of(calls: Iterable[Call]) -> list[Span]:
    """Attempts in the order in which they first appear. Within an attempt, calls are in order of `index`, and the
    results in a call's request come before its answer.
    """
    attempts = by_attempt(calls).values()
    return [span for calls in attempts for span in _Attempt(sorted(calls, key=lambda call: call.index)).spans()]


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A tool call of an answer."""

    call: Call
    tool_call: ToolCall
    place: int
    """Among those of the same answer."""
    settled: bool = False
    """It has its span: the result has come, or the tool call is malformed."""


@dataclass(frozen=True, slots=True)
class _Result:
    """A tool's result in a request."""

    message: Message
    tool_call: ToolCall | None
    """The tool call, as the request repeats it; None if it does not."""


class _Attempt:
    """One attempt's calls, in order of their arrival."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._parents = {call.id: call.parent_call_id for call in calls}
        self._pending: defaultdict[Hashable, list[_Pending]] = defaultdict(list)
        """By the tool call's id, and by name and arguments, as a client may have dropped or changed the id."""

    def spans(self) -> Iterator[Span]:
        reader = Reader(lenient=True)
        for call in self._calls:
            request, answer = reader.request(call), reader.answer(call)
            if request is not None:
                yield from self._results(call, _results_in(request.messages))
            if answer is not None and call.capture != "incomplete":  # a broken answer reached no agent
                yield from self._remember(call, answer)
            yield _llm(call, answer)

    def _remember(self, call: Call, answer: Message) -> Iterator[Span]:
        for place, tool_call in enumerate(answer.tool_calls):
            broken = malformed(tool_call.arguments)
            pending = _Pending(call=call, tool_call=tool_call, place=place, settled=broken)
            if broken:
                yield _malformed(call, name=tool_call.name, text=tool_call.arguments, place=place, tool_id=tool_call.id)
            for key in _keys(tool_call):
                self._pending[key].append(pending)
        offered = call.request.get("tools") or call.request.get("functions")
        if offered and not answer.tool_calls and BEGUN.search(answer.content):
            name = NAME.search(answer.content)
            yield _malformed(call, name=name[1] if name else "", text=answer.content, place=0, tool_id="")

    def _results(self, call: Call, results: Sequence[_Result]) -> Iterator[Span]:
        """Spans of the results that are new. The last results of a key belong to its last tool calls: a client may have
        dropped the beginning of the conversation.
        """
        by_key: dict[Hashable, list[_Result]] = {}
        for result in results:
            if (key := self._key(result)) is not None:
                by_key.setdefault(key, []).append(result)
        found: list[tuple[_Pending, _Result]] = []
        for key, same in by_key.items():
            found.extend(zip(reversed(self._candidates(call, key)), reversed(same), strict=False))
        for pending, result in sorted(found, key=lambda pair: (pair[0].call.index, pair[0].place)):
            if not pending.settled:
                pending.settled = True
                yield _tool(pending, result.message, at=call.started_at)

    def _key(self, result: _Result) -> Hashable | None:
        if result.message.tool_call_id in self._pending:
            return result.message.tool_call_id
        keys = _keys(result.tool_call) if result.tool_call else []
        return next((key for key in keys if key in self._pending), None)

    def _candidates(self, call: Call, key: Hashable) -> list[_Pending]:
        """Tool calls that the result may belong to: of several, those of the same conversation if there are any."""
        candidates = self._pending[key]
        if len(candidates) == 1:
            return candidates
        before = set(self._before(call))
        return [pending for pending in candidates if pending.call.id in before] or candidates

    def _before(self, call: Call) -> Iterator[str]:
        parent = call.parent_call_id
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)


def _results_in(messages: Iterable[Message]) -> list[_Result]:
    """All tool results. One without an id belongs to the last assistant turn's first open tool call of its name."""
    by_id: dict[str, ToolCall] = {}
    unnamed: list[ToolCall] = []
    results: list[_Result] = []
    for message in messages:
        if message.role == "assistant":
            by_id.update((tool_call.id, tool_call) for tool_call in message.tool_calls)
            unnamed = [tool_call for tool_call in message.tool_calls if not tool_call.id]
        elif message.role in ("tool", "function") and message.tool_call_id:
            results.append(_Result(message, by_id.get(message.tool_call_id)))
        elif message.role in ("tool", "function"):
            found = next((tool_call for tool_call in unnamed if tool_call.name == message.name), None)
            unnamed = [tool_call for tool_call in unnamed if tool_call is not found]
            results.append(_Result(message, found))
    return results


def _keys(tool_call: ToolCall) -> list[Hashable]:
    by_name = (tool_call.name, arguments_key(tool_call.arguments))
    return [tool_call.id, by_name] if tool_call.id else [by_name]


def _llm(call: Call, answer: Message | None) -> Span:
    broken = call.capture == "incomplete" or call.finish_reason in ("error", "cancelled")
    model = call.request.get("model")
    return Span(
        id=f"{call.id}/llm",
        attempt_id=call.attempt_id,
        call_id=call.id,
        kind="llm",
        name=model if isinstance(model, str) else call.policy,
        status="error" if broken else "ok",
        error=(call.capture_reason or call.finish_reason) if broken else None,
        output=answer.content if answer is not None else None,
        started_at=call.started_at,
        ended_at=call.ended_at,
        attributes={
            "gen_ai.agent.name": call.agent,
            "gen_ai.response.id": call.id,
            "gen_ai.usage.input_tokens": len(call.prompt_ids),
            "gen_ai.usage.output_tokens": len(call.completion_ids),
        },
    )


def _tool(pending: _Pending, result: Message, *, at: float) -> Span:
    call, tool_call = pending.call, pending.tool_call
    failure = failure_of(result.content, declared=result.failed)
    raised: Mapping[str, str] = {EXCEPTION_TYPE: failure.exception} if failure and failure.exception else {}
    return Span(
        id=f"{call.id}/tool/{pending.place}",
        attempt_id=call.attempt_id,
        call_id=call.id,
        kind="tool",
        name=tool_call.name,
        status="error" if failure else "unset",
        error=failure.message if failure else None,
        input=tool_call.arguments,
        output=result.content,
        started_at=call.ended_at,
        ended_at=at,
        attributes={TOOL_CALL_ID: tool_call.id, **raised},
    )


def _malformed(call: Call, *, name: str, text: str, place: int, tool_id: str) -> Span:
    return Span(
        id=f"{call.id}/tool/{place}",
        attempt_id=call.attempt_id,
        call_id=call.id,
        kind="tool",
        name=name,
        status="error",
        error="the tool call cannot be read: its arguments are no JSON object",
        input=text,
        started_at=call.ended_at,
        ended_at=call.ended_at,
        attributes={TOOL_CALL_ID: tool_id, MALFORMED: True},
    )
