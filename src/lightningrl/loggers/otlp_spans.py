"""Which spans tell a rollout? One trace for each attempt, in the words of OpenTelemetry's conventions for GenAI.

The conventions are those of the release 1.41.1 (commit ead83b9), the last one of
https://github.com/open-telemetry/semantic-conventions/tree/v1.41.1/docs/gen-ai; they are in development.

    invoke_agent       the attempt; `gen_ai.conversation.id` is the rollout; its rewards are `gen_ai.evaluation.result`
    ├─ chat MODEL      a call; rewards of this call are events of this span
    ├─ execute_tool T  a tool call, derived from the calls, or
    └─ …               what the agent's own telemetry reported, with its ids and parents

If the agent reported spans, the attempt is in their trace, and their roots hang below it. A call or a tool that both
report is the agent's span, with what the calls add. Further traces of the agent keep their ids; the attempt links them.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

import lightningrl
from lightningrl.loggers.base import Ended, Run
from lightningrl.loggers.content import error_type, said
from lightningrl.loggers.otlp_words import (
    attempt_words,
    call_texts,
    call_words,
    name_of,
    reward_words,
    span_words,
)
from lightningrl.tracing import call_during, spans_of, united
from lightningrl.types import Attempt, Call, Span

SCHEMA = "https://opentelemetry.io/schemas/1.41.1"
INTERNAL, CLIENT = trace_pb2.Span.SPAN_KIND_INTERNAL, trace_pb2.Span.SPAN_KIND_CLIENT
EVALUATION = "gen_ai.evaluation.result"


def resource(run: Run) -> Resource:
    """What sends: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` have priority."""
    given = [pair.partition("=") for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")]
    told = {
        "service.name": "lightningrl",
        "service.version": lightningrl.__version__,
        "lightningrl.run": run.name,
        "lightningrl.recipe": run.project,
        **{name.strip(): unquote(value.strip()) for name, equals, value in given if equals},
    }
    if name := os.environ.get("OTEL_SERVICE_NAME"):
        told["service.name"] = name
    return Resource(attributes=_pairs(told))


def scope() -> InstrumentationScope:
    return InstrumentationScope(name="lightningrl", version=lightningrl.__version__)


def spans_of_rollout(ended: Ended, *, run: str, salt: str, texts: bool) -> list[trace_pb2.Span]:
    """All spans of the attempts that were not sent yet. Ids follow from `salt` and the records: they are the same each
    time.
    """
    attempts = [_Attempt(ended, attempt, run=run, salt=salt, texts=texts) for attempt in ended.attempts]
    return [span for attempt in attempts for span in attempt.spans()]


class _Attempt:
    """One attempt as a trace."""

    def __init__(self, ended: Ended, attempt: Attempt, *, run: str, salt: str, texts: bool) -> None:
        self._ended, self._attempt, self._texts = ended, attempt, texts
        self._run, self._salt = run, salt
        self._calls = [call for call in ended.calls if call.attempt_id == attempt.id]
        self._rewards = [reward for reward in ended.rewards if reward.attempt_id == attempt.id]
        recorded = [span for span in ended.spans if span.attempt_id == attempt.id]
        derived = spans_of(self._calls)
        both = united(recorded, derived)
        merged = {(span.trace_id, span.id): span for span in both if span.trace_id}
        self._recorded = [merged.get((span.trace_id, span.id), span) for span in recorded]
        self._tools = [span for span in both if not span.trace_id and span.kind != "llm"]
        self._call_of = calls_told(self._recorded, derived)
        traces = [span.trace_id for span in self._recorded]
        self._trace = bytes.fromhex(traces[0]) if traces else self._id(attempt.id, size=16)
        self._others = dict.fromkeys(trace for trace in traces if trace != traces[0])
        self._root = self._id(attempt.id, "attempt")

    def spans(self) -> list[trace_pb2.Span]:
        words = {call.id: call_words(call) for call in self._calls}
        if self._texts:
            for call, messages, answer in said(self._calls):
                words[call.id] |= call_texts(call, messages, answer)
        reported = [self._reported(span, words) for span in self._recorded]
        left = [call for call in self._calls if call.id not in self._call_of.values()]
        chats = [self._chat(call, words[call.id]) for call in left]
        return [self._whole(), *chats, *(self._tool(span) for span in self._tools), *reported]

    def _whole(self) -> trace_pb2.Span:
        attempt = self._attempt
        times = [attempt.started_at, *(call.ended_at for call in self._calls)]
        failed = attempt.status != "succeeded"
        span = trace_pb2.Span(
            trace_id=self._trace,
            span_id=self._root,
            name=name_of("agent", ""),
            kind=INTERNAL,
            start_time_unix_nano=_nanoseconds(attempt.started_at),
            end_time_unix_nano=_nanoseconds(attempt.ended_at or max(times)),
            attributes=_pairs(attempt_words(self._ended, attempt, run=self._run, texts=self._texts)),
            events=self._evaluations(None, at=attempt.ended_at or max(times)),
        )
        for trace in self._others:
            first = next(span for span in self._recorded if span.trace_id == trace)
            span.links.add(trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(first.id))
        if failed:
            self._fail(span, error_type(attempt.error) or attempt.status, attempt.error)
        return span

    def _chat(self, call: Call, words: Mapping[str, Any]) -> trace_pb2.Span:
        span = trace_pb2.Span(
            trace_id=self._trace,
            span_id=self._id(call.id),
            parent_span_id=self._root,
            name=f"{words['gen_ai.operation.name']} {words['gen_ai.request.model']}",
            kind=CLIENT,
            start_time_unix_nano=_nanoseconds(call.started_at),
            end_time_unix_nano=_nanoseconds(call.ended_at),
            attributes=_pairs(words),
            events=self._evaluations(call.id, at=call.ended_at),
        )
        if call.capture == "incomplete" or call.finish_reason in ("error", "cancelled"):
            self._fail(span, call.finish_reason, call.capture_reason)
        return span

    def _tool(self, tool: Span) -> trace_pb2.Span:
        return self._span(tool, self._trace, self._id(tool.id), self._root, span_words(tool, texts=self._texts))

    def _reported(self, span: Span, words: Mapping[str, Mapping[str, Any]]) -> trace_pb2.Span:
        """A span of the agent's telemetry, with the words of the call that it tells of."""
        trace, call_id = bytes.fromhex(span.trace_id), self._call_of.get((span.trace_id, span.id))
        above = self._root if trace == self._trace else b""
        parent = bytes.fromhex(span.parent_id) if span.parent_id else above
        added = words.get(call_id or "", {})
        made = self._span(span, trace, bytes.fromhex(span.id), parent, {**span_words(span, texts=self._texts), **added})
        if call_id is not None:
            made.events.extend(self._evaluations(call_id, at=span.ended_at))
        return made

    def _span(
        self, span: Span, trace: bytes, span_id: bytes, parent: bytes, words: Mapping[str, Any]
    ) -> trace_pb2.Span:
        made = trace_pb2.Span(
            trace_id=trace,
            span_id=span_id,
            parent_span_id=parent,
            name=name_of(span.kind, span.name),
            kind=CLIENT if span.kind == "llm" else INTERNAL,
            start_time_unix_nano=_nanoseconds(span.started_at),
            end_time_unix_nano=_nanoseconds(span.ended_at),
            attributes=_pairs(words),
        )
        if span.status == "error":
            self._fail(made, str(span.attributes.get("exception.type") or "_OTHER"), span.error)
        return made

    def _evaluations(self, call_id: str | None, *, at: float) -> list[trace_pb2.Span.Event]:
        """The rewards of a call; None: of the attempt."""
        at_ns, own = _nanoseconds(at), [reward for reward in self._rewards if reward.call_id == call_id]
        return [
            trace_pb2.Span.Event(time_unix_nano=at_ns, name=EVALUATION, attributes=_pairs(reward_words(reward)))
            for reward in own
        ]

    def _fail(self, span: trace_pb2.Span, kind: str, message: str | None) -> None:
        span.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        span.attributes.extend(_pairs({"error.type": kind}))
        if self._texts and message:
            span.status.message = message.partition("\n")[0]

    def _id(self, *parts: str, size: int = 8) -> bytes:
        return hashlib.sha256("/".join((self._salt, *parts)).encode()).digest()[:size]


def calls_told(recorded: Iterable[Span], derived: Sequence[Span]) -> dict[tuple[str, str], str]:
    """(trace id, span id) of a recorded LLM span → the call that it tells of. If several libraries tell of one call,
    the innermost span counts.
    """
    span_of: dict[str, Span] = {}
    for span in recorded:
        call_id = call_during(span, derived) if span.kind == "llm" else None
        if call_id is not None and (call_id not in span_of or span.started_at >= span_of[call_id].started_at):
            span_of[call_id] = span
    known = {span.call_id for span in derived if span.kind == "llm"}
    return {(span.trace_id, span.id): call_id for call_id, span in span_of.items() if call_id in known}


def _pairs(values: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes; those that are None are left out."""
    return [KeyValue(key=key, value=_value(value)) for key, value in values.items() if value is not None]


def _value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case list() | tuple():
            return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))
        case str():
            return AnyValue(string_value=value.encode("utf-8", "replace").decode())  # no lone surrogates in protobuf
        case _:
            return AnyValue(string_value=msgspec.json.encode(value).decode())


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
