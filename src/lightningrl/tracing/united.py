"""Spans that telemetry has told, and spans that follow from the calls: which of them are the same, and which call is
behind each?

A tool that both know of counts once: what telemetry says goes first, as it was there; the call that asked for the tool,
its arguments as the model wrote them, and a failure that only the result tells are added from the derived span.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lightningrl.arguments import arguments_key
from lightningrl.tracing.derived import TOOL_CALL_ID
from lightningrl.types import Span, by_attempt


def united(recorded: Iterable[Span], derived: Iterable[Span]) -> list[Span]:
    """All spans of the attempts, each event once, in order of time within an attempt. LLM spans are those of the calls;
    telemetry's are kept only where no call is behind them.
    """
    told, followed = by_attempt(recorded), by_attempt(derived)
    return [
        span
        for attempt_id in dict.fromkeys([*followed, *told])
        for span in _of_attempt(told.get(attempt_id, []), followed.get(attempt_id, []))
    ]


def _of_attempt(recorded: Sequence[Span], derived: Sequence[Span]) -> list[Span]:
    recorded = _without_echoes(recorded)
    answers = [
        span if span.call_id else replace(span, call_id=_during(span, derived))
        for span in recorded
        if span.kind == "llm"
    ]
    joined, claimed = _tools(
        [span for span in recorded if span.kind == "tool"], [span for span in derived if span.kind == "tool"]
    )
    others = [span for span in recorded if span.kind not in ("llm", "tool")]
    stray = [span for span in answers if span.call_id is None]
    caused = [span if span.call_id else replace(span, call_id=_cause(span, answers)) for span in [*joined, *others]]
    left = [span for span in derived if span.id not in claimed]
    return sorted([*left, *caused, *stray], key=lambda span: span.started_at)


def _tools(recorded: Sequence[Span], derived: Sequence[Span]) -> tuple[list[Span], set[str]]:
    """Telemetry's tool spans with what the derived ones know besides, and the ids of those.

    By the id of the tool call, else by name and arguments, else by name and time.
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
    return [_merged(span, found[place]) if place in found else span for place, span in enumerate(recorded)], set(
        claimed
    )


def _same_id(span: Span, twin: Span) -> bool:
    return bool(tool_id := span.attributes.get(TOOL_CALL_ID)) and tool_id == twin.attributes.get(TOOL_CALL_ID)


def _same_arguments(span: Span, twin: Span) -> bool:
    unnamed = TOOL_CALL_ID not in span.attributes
    return (
        unnamed
        and span.name == twin.name
        and span.input is not None
        and arguments_key(span.input) == arguments_key(twin.input or "")
    )


def _same_time(span: Span, twin: Span) -> bool:
    return (
        TOOL_CALL_ID not in span.attributes
        and span.name == twin.name
        and twin.started_at <= span.started_at <= span.ended_at <= twin.ended_at
    )


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


def _during(span: Span, derived: Sequence[Span]) -> str | None:
    """The only call that was answered while an LLM span lasted."""
    within = [
        twin.call_id
        for twin in derived
        if twin.kind == "llm" and span.started_at <= twin.started_at <= twin.ended_at <= span.ended_at
    ]
    return within[0] if len(within) == 1 and span.ended_at > span.started_at else None


def _cause(span: Span, answers: Sequence[Span]) -> str | None:
    """The last answer before it: of the same parent if there is one, else of the same trace."""
    before = [
        answer
        for answer in answers
        if answer.call_id and answer.trace_id == span.trace_id and answer.ended_at <= span.started_at
    ]
    beside = [answer for answer in before if answer.parent_id == span.parent_id]
    return max(beside or before, key=lambda answer: answer.ended_at).call_id if before else None


def _without_echoes(spans: Sequence[Span]) -> list[Span]:
    """Without tool spans within one of the same tool (two libraries that both watch it), or with the same tool call id."""
    by_id = {(span.trace_id, span.id): span for span in spans}
    seen: set[str] = set()
    kept: list[Span] = []
    for span in spans:
        tool_id = span.attributes.get(TOOL_CALL_ID)
        inner = any(outer.kind == "tool" and outer.name == span.name for outer in _around(span, by_id))
        if span.kind == "tool" and (inner or tool_id in seen):
            continue
        if span.kind == "tool" and tool_id:
            seen.add(tool_id)
        kept.append(span)
    return kept


def _around(span: Span, by_id: Mapping[tuple[str, str], Span]) -> Iterator[Span]:
    passed = {span.id}
    while (parent := by_id.get((span.trace_id, span.parent_id or ""))) is not None and parent.id not in passed:
        passed.add(parent.id)
        yield parent
        span = parent
