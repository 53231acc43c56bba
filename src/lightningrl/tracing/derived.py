"""Which spans follow from the calls alone? One for each call, and one for each tool call whose result a later request
of the attempt brings.

This is the one source that every agent has: it needs no telemetry, only that the agent goes on talking to its model.

    call   answer asks for         request of a later call brings     span
    c1     weather (call_1)                                           llm c1
    c2                             call_1: "21 °C"                    tool weather, caused by c1, then llm c2

A history repeats its results with every request; each counts once. A tool call that cannot be read (no JSON object as
arguments, or no tool call at all although it was begun) is a span with an error, whether anybody answers it or not.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lightningrl.tracing.bodies import READERS, Ask, Reader, Told
from lightningrl.tracing.failure import failure_of
from lightningrl.types import Call, Span

TOOL_CALL_ID = "gen_ai.tool.call.id"
EXCEPTION_TYPE = "exception.type"
MALFORMED = "lightningrl.malformed"
"""True: the tool call's arguments are no JSON object."""
BEGUN = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|\A\s*\[?\s*\{\s*\"name\"\s*:")
"""How the tool calls begin that the gateway reads; in an answer without any, one of them could not be read."""
NAME = re.compile(r"\"name\"\s*:\s*\"([^\"]+)\"")


def spans_of(calls: Iterable[Call]) -> list[Span]:
    """Attempts in the order in which they first appear; within one, in order of `index`, a call's request before its
    answer.
    """
    attempts: dict[str, list[Call]] = {}
    for call in calls:
        attempts.setdefault(call.attempt_id, []).append(call)
    return [span for made in attempts.values() for span in _Attempt(sorted(made, key=lambda call: call.index)).spans()]


def arguments_key(arguments: str) -> str:
    """Equal for arguments that mean the same: white space and the order of keys make no difference."""
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments.strip()


def malformed(arguments: str) -> bool:
    """Whether arguments are no JSON object. None at all are an empty one."""
    try:
        msgspec.json.decode(arguments.strip() or "{}", type=dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return True
    return False


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A tool call, and whether its result has come."""

    call: Call
    ask: Ask
    place: int
    """Among those of the same answer."""
    told: bool = False


class _Attempt:
    """One attempt's calls, in order of their arrival."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._parents = {call.id: call.parent_call_id for call in calls}
        self._asked: defaultdict[Hashable, list[_Asked]] = defaultdict(list)
        """By the id of the tool call, and by name and arguments where a client has dropped or changed the id."""

    def spans(self) -> Iterator[Span]:
        for call in self._calls:
            reader = READERS.get(call.dialect)
            if reader is not None:
                yield from self._results(call, reader.told(call.request))
                if call.capture != "incomplete":  # nobody has read the answer, nobody runs its tools
                    yield from self._remember(call, reader)
            yield _llm(call, reader)

    def _remember(self, call: Call, reader: Reader) -> Iterator[Span]:
        asks = reader.asks(call.response)
        for place, ask in enumerate(asks):
            asked = _Asked(call=call, ask=ask, place=place, told=malformed(ask.arguments))
            if asked.told:
                yield _unreadable(call, name=ask.name, text=ask.arguments, place=place, tool_id=ask.id)
            for key in _keys(ask):
                self._asked[key].append(asked)
        text = reader.text(call.response)
        if not asks and BEGUN.search(text) and reader.tools(call.request):
            name = NAME.search(text)
            yield _unreadable(call, name=name[1] if name else "", text=text, place=0, tool_id="")

    def _results(self, call: Call, told: Sequence[Told]) -> Iterator[Span]:
        """Those that are new. The last results of a key belong to its last tool calls: a client may have dropped the
        beginning.
        """
        by_key: dict[Hashable, list[Told]] = {}
        for result in told:
            if (key := self._key(result)) is not None:
                by_key.setdefault(key, []).append(result)
        found = [
            pair
            for key, results in by_key.items()
            for pair in zip(reversed(self._candidates(call, key)), reversed(results), strict=False)
        ]
        for asked, result in sorted(found, key=lambda pair: (pair[0].call.index, pair[0].place)):
            if not asked.told:
                asked.told = True
                yield _tool(asked, result, at=call.started_at)

    def _key(self, result: Told) -> Hashable | None:
        if result.id and result.id in self._asked:
            return result.id
        return next((key for key in _keys(result.asked) if key in self._asked), None) if result.asked else None

    def _candidates(self, call: Call, key: Hashable) -> list[_Asked]:
        """Tool calls that the result may belong to; where there are several, those of this very conversation if it has
        any.
        """
        candidates = self._asked[key]
        if len(candidates) == 1:
            return candidates
        before = set(self._before(call))
        return [asked for asked in candidates if asked.call.id in before] or candidates

    def _before(self, call: Call) -> Iterator[str]:
        parent = call.parent_call_id
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)


def _keys(ask: Ask) -> list[Hashable]:
    return [*([ask.id] if ask.id else []), (ask.name, arguments_key(ask.arguments))]


def _llm(call: Call, reader: Reader | None) -> Span:
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
        output=reader.text(call.response) if reader is not None else None,
        started_at=call.started_at,
        ended_at=call.ended_at,
        attributes={
            "gen_ai.agent.name": call.agent,
            "gen_ai.response.id": call.id,
            "gen_ai.usage.input_tokens": len(call.prompt_ids),
            "gen_ai.usage.output_tokens": len(call.completion_ids),
        },
    )


def _tool(asked: _Asked, result: Told, *, at: float) -> Span:
    failure = failure_of(result.output, declared=result.failed)
    raised: Mapping[str, str] = {EXCEPTION_TYPE: failure.exception} if failure and failure.exception else {}
    return Span(
        id=f"{asked.call.id}/tool/{asked.place}",
        attempt_id=asked.call.attempt_id,
        call_id=asked.call.id,
        kind="tool",
        name=asked.ask.name,
        status="error" if failure else "unset",
        error=failure.message if failure else None,
        input=asked.ask.arguments,
        output=result.output,
        started_at=asked.call.ended_at,
        ended_at=at,
        attributes={TOOL_CALL_ID: asked.ask.id, **raised},
    )


def _unreadable(call: Call, *, name: str, text: str, place: int, tool_id: str) -> Span:
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
