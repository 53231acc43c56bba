"""Recorded spans (from telemetry) and derived spans (from the calls) → one list, with the call that caused each span.

A tool run that both report counts once. The recorded span has priority, as telemetry observed the tool. The derived
span adds the call that requested the tool, the arguments as the model wrote them, and a failure that only the result
shows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lightningrl.arguments import arguments_key
from lightningrl.tracing.derived import TOOL_CALL_ID
from lightningrl.types import Span, by_attempt


def united(recorded: Iterable[Span], derived: Iterable[Span]) -> list[Span]:
    """All spans of the attempts, each event once, in order of time within an attempt. Of LLM spans, recorded ones are
    kept only if they belong to no call.
    """
    from_telemetry, from_calls = by_attempt(recorded), by_attempt(derived)
    spans: list[Span] = []
    for attempt_id in dict.fromkeys([*from_calls, *from_telemetry]):
        spans += _of_attempt(from_telemetry.get(attempt_id, []), from_calls.get(attempt_id, []))
    return spans


def _of_attempt(recorded: Sequence[Span], derived: Sequence[Span]) -> list[Span]:
    recorded = _without_echoes(recorded)
    answers = [replace(span, call_id=call_during(span, derived)) for span in recorded if span.kind == "llm"]
    joined, claimed = _tools(_of_tools(recorded), _of_tools(derived))
    others = [span for span in recorded if span.kind not in ("llm", "tool")]
    stray = [span for span in answers if span.call_id is None]
    caused = [replace(span, call_id=_cause(span, answers)) for span in [*joined, *others]]
    left = [span for span in derived if span.id not in claimed]
    return sorted([*left, *caused, *stray], key=lambda span: span.started_at)


def _of_tools(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.kind == "tool"]


def _tools(recorded: Sequence[Span], derived: Sequence[Span]) -> tuple[list[Span], set[str]]:
    """Recorded tool spans, merged with their derived twins; and the ids of those twins.

    Twins match by the id of the tool call, otherwise by name and arguments, otherwise by name and time.
    """
    claimed: dict[str, Span] = {}
    found: dict[int, Span] = {}
    for fits in (_same_id, _same_arguments, _same_time):
        for place, span in enumerate(recorded):
            if place in found:
                continue
            twin = next((twin for twin in derived if twin.id not in claimed and fits(span, twin)), None)
            if twin is not None:
                found[place] = claimed[twin.id] = twin
    merged = [_merged(span, found[place]) if place in found else span for place, span in enumerate(recorded)]
    return merged, set(claimed)


def _same_id(span: Span, twin: Span) -> bool:
    return bool(tool_id := span.attributes.get(TOOL_CALL_ID)) and tool_id == twin.attributes.get(TOOL_CALL_ID)


def _same_arguments(span: Span, twin: Span) -> bool:
    if TOOL_CALL_ID in span.attributes or span.name != twin.name or span.input is None:
        return False
    return arguments_key(span.input) == arguments_key(twin.input or "")


def _same_time(span: Span, twin: Span) -> bool:
    if TOOL_CALL_ID in span.attributes or span.name != twin.name:
        return False
    return twin.started_at <= span.started_at <= span.ended_at <= twin.ended_at


def _merged(span: Span, twin: Span) -> Span:
    failed = span.status != "error" and twin.status == "error"
    return replace(
        span,
        call_id=twin.call_id,
        status=twin.status if failed else span.status,
        error=twin.error if failed else span.error,
        input=twin.input,
        output=twin.output if span.output is None else span.output,
        attributes={**twin.attributes, **span.attributes},
    )


def call_during(span: Span, derived: Sequence[Span]) -> str | None:
    """The call of an LLM span: if unknown, the only call that was answered during the span."""
    if span.call_id:
        return span.call_id
    within = [
        twin.call_id
        for twin in derived
        if twin.kind == "llm" and span.started_at <= twin.started_at <= twin.ended_at <= span.ended_at
    ]
    return within[0] if len(within) == 1 and span.ended_at > span.started_at else None


def _cause(span: Span, answers: Sequence[Span]) -> str | None:
    """The call that caused a span: if unknown, the last answer before it with the same parent, or in the same trace."""
    if span.call_id:
        return span.call_id
    before = [
        answer
        for answer in answers
        if answer.call_id and answer.trace_id == span.trace_id and answer.ended_at <= span.started_at
    ]
    beside = [answer for answer in before if answer.parent_id == span.parent_id]
    return max(beside or before, key=lambda answer: answer.ended_at).call_id if before else None


def _without_echoes(spans: Sequence[Span]) -> list[Span]:
    """Drop a tool span inside a span of the same tool (two libraries observe it), and a repeated tool call id."""
    by_id = {(span.trace_id, span.id): span for span in spans}
    seen: set[str] = set()
    kept: list[Span] = []
    for span in spans:
        tool_id = span.attributes.get(TOOL_CALL_ID)
        inner = any(outer.kind == "tool" and outer.name == span.name for outer in around(span, by_id))
        if span.kind == "tool" and (inner or tool_id in seen):
            continue
        if span.kind == "tool" and tool_id:
            seen.add(tool_id)
        kept.append(span)
    return kept


def around(span: Span, by_id: Mapping[tuple[str, str], Span]) -> Iterator[Span]:
    """The spans that enclose a span, innermost first. `by_id`: (trace, id) → span."""
    passed = {span.id}
    while (parent := by_id.get((span.trace_id, span.parent_id or ""))) is not None and parent.id not in passed:
        passed.add(parent.id)
        yield parent
        span = parent
