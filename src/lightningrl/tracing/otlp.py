"""Spans from OpenTelemetry exporters (OTLP over HTTP, protobuf or JSON) → `Span`.

It reads two vocabularies: OpenTelemetry's for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/) and
OpenInference (https://arize-ai.github.io/openinference/spec/). A span of neither has the kind `other`.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from lightningrl.tracing.derived import EXCEPTION_TYPE, TOOL_CALL_ID
from lightningrl.tracing.failure import failure_of
from lightningrl.types import Span, SpanKind, SpanStatus

Encoding: TypeAlias = Literal["protobuf", "json"]
Attributes: TypeAlias = dict[str, Any]

RESPONSE_ID = "gen_ai.response.id"
DOCUMENTS = "lightningrl.documents"
"""How many documents a retrieval returned."""
TRIGGERED = "lightningrl.triggered"
"""True: a guardrail fired."""

OPERATIONS: Mapping[str, SpanKind] = {
    "execute_tool": "tool",
    "chat": "llm",
    "text_completion": "llm",
    "generate_content": "llm",
    "invoke_agent": "agent",
    "create_agent": "agent",
    "retrieval": "retrieval",
}
"""`gen_ai.operation.name`"""
KINDS: Mapping[str, SpanKind] = {
    "TOOL": "tool",
    "LLM": "llm",
    "RETRIEVER": "retrieval",
    "AGENT": "agent",
    "GUARDRAIL": "guardrail",
}
"""`openinference.span.kind`"""
NAMES: Mapping[str, Sequence[str]] = {
    "tool": ("gen_ai.tool.name", "tool.name", "tool_call.function.name"),
    "agent": ("gen_ai.agent.name", "agent.name"),
    "llm": ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name"),
}
INPUTS = ("gen_ai.tool.call.arguments", "tool_call.function.arguments", "tool_arguments", "input.value")
OUTPUTS = ("gen_ai.tool.call.result", "tool_response", "output.value")
"""`tool_arguments` and `tool_response` are Pydantic AI's."""
TOOL_CALL_IDS = (TOOL_CALL_ID, "tool_call.id", "tool.id")
DROPPED = re.compile(
    r"llm\.(?:input|output)_messages\.|llm\.prompts|gen_ai\.(?:prompt|completion|input\.messages|output\.messages|system_instructions)"
)
"""Attributes that are dropped: the recorded call has their content, token by token."""
FIRED = ("triggered", "tripwire_triggered", "flagged", "blocked")
DOCUMENT = re.compile(r"retrieval\.documents\.(\d+)\.")

KEPT = 64 * 1024
"""Maximum length of an input, an output or an attribute, in characters; the rest is cut off."""


class BadTelemetry(Exception):
    """The body is not OTLP."""


def decode(body: bytes, encoding: Encoding) -> list[Span]:
    """Spans that belong to no attempt yet: `attempt_id` is "", `call_id` is None. Raises `BadTelemetry`."""
    try:
        request = ExportTraceServiceRequest.FromString(body) if encoding == "protobuf" else _from_json(body)
    except (
        DecodeError,
        json_format.Error,
        msgspec.DecodeError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise BadTelemetry(f"the body is no ExportTraceServiceRequest in {encoding}: {error}") from error
    return [
        _span(span) for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]


def answer(encoding: Encoding, *, rejected: int, message: str) -> bytes:
    """The response to an export: how many spans were rejected, and why."""
    response = ExportTraceServiceResponse()
    if rejected or message:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = message
    if encoding == "protobuf":
        return response.SerializeToString()
    return msgspec.json.encode(json_format.MessageToDict(response))


def refusal(encoding: Encoding, *, code: int, message: str) -> bytes:
    """An error response: OTLP uses google.rpc.Status, where `code` is field 1 and `message` field 2."""
    if encoding == "json":
        return msgspec.json.encode({"code": code, "message": message})
    text = message.encode()
    return b"\x08" + _varint(code) + b"\x12" + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    rest, last = divmod(number, 128)
    return bytes([last]) if not rest else bytes([last | 128]) + _varint(rest)


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    """OTLP writes ids in hexadecimal, protobuf's JSON in base64."""
    tree = msgspec.json.decode(body, type=dict[str, Any])
    for span in _each(tree, "resourceSpans", "scopeSpans", "spans"):
        for holder in (span, *_each(span, "links")):
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in holder:
                    holder[key] = base64.b64encode(bytes.fromhex(holder[key])).decode()
    return json_format.ParseDict(tree, ExportTraceServiceRequest(), ignore_unknown_fields=True)


def _each(tree: dict[str, Any], *path: str) -> Iterable[dict[str, Any]]:
    level = [tree]
    for key in path:
        level = [child for parent in level for child in parent.get(key) or []]
    return level


def _span(sent: trace_pb2.Span) -> Span:
    attributes = _attributes(sent.attributes)
    kind = _kind(attributes)
    given, output = _first(attributes, INPUTS), _first(attributes, OUTPUTS)
    status, error, exception = _status(sent, attributes)
    if kind == "tool" and status == "unset" and output is not None and (failure := failure_of(output)):
        status, error, exception = "error", failure.message, failure.exception
    found = _normalised(kind, attributes, output) | ({EXCEPTION_TYPE: exception} if exception else {})
    return Span(
        id=sent.span_id.hex(),
        attempt_id="",
        call_id=None,
        kind=kind,
        name=_first(attributes, NAMES.get(kind, ())) or sent.name.removeprefix("execute_tool "),
        status=status,
        error=error,
        input=None if kind == "llm" or given is None else given[:KEPT],
        output=None if kind == "llm" or output is None else output[:KEPT],
        started_at=sent.start_time_unix_nano / 1e9,
        ended_at=sent.end_time_unix_nano / 1e9,
        trace_id=sent.trace_id.hex(),
        parent_id=sent.parent_span_id.hex() or None,
        attributes={**_kept(attributes), **found},
    )


def _kind(attributes: Attributes) -> SpanKind:
    kind = KINDS.get(str(attributes.get("openinference.span.kind", "")).upper())
    kind = kind or OPERATIONS.get(str(attributes.get("gen_ai.operation.name", "")))
    return kind or ("tool" if "gen_ai.tool.name" in attributes else "other")


def _status(sent: trace_pb2.Span, attributes: Attributes) -> tuple[SpanStatus, str | None, str | None]:
    """(status, error, type of the exception). A recorded exception is an error unless the span's status is OK."""
    code = sent.status.code
    if code == trace_pb2.Status.STATUS_CODE_OK:
        return "ok", None, None
    events = [_attributes(event.attributes) for event in sent.events if event.name == "exception"]
    raised = events[-1] if events else {}
    if code != trace_pb2.Status.STATUS_CODE_ERROR and not raised and not attributes.get("error.type"):
        return "unset", None, None
    exception = raised.get(EXCEPTION_TYPE)
    found = ": ".join(str(part) for part in (exception, raised.get("exception.message")) if part)
    error = found or sent.status.message or str(attributes.get("error.type") or "error")
    if exception is None and (failure := failure_of(error)):  # some libraries put the exception into the status alone
        exception = failure.exception
    return "error", error[:KEPT], None if exception is None else str(exception)


def _normalised(kind: SpanKind, attributes: Attributes, output: str | None) -> Attributes:
    """Attributes that libraries name differently, under one name."""
    found: Attributes = {}
    if (tool_id := _first(attributes, TOOL_CALL_IDS)) and kind == "tool":
        found[TOOL_CALL_ID] = tool_id
    if kind == "llm" and (response_id := attributes.get(RESPONSE_ID) or _answered_as(output)):
        found[RESPONSE_ID] = str(response_id)
    if kind == "retrieval" and (count := _documents(attributes)) is not None:
        found[DOCUMENTS] = count
    if kind == "guardrail" and (_fires(attributes) or _fires(_object(output))):
        found[TRIGGERED] = True
    return found


def _answered_as(output: str | None) -> str | None:
    """The response id in the output: OpenInference keeps the whole response there, as text."""
    body = _object(output)
    return body.get("id") or body.get("responseId") or body.get("response_id")


def _documents(attributes: Attributes) -> int | None:
    listed = attributes.get("gen_ai.retrieval.documents")
    if isinstance(listed, str):
        try:
            listed = msgspec.json.decode(listed)
        except msgspec.DecodeError:
            listed = None
    if isinstance(listed, list):
        return len(listed)
    places = {found[1] for key in attributes if (found := DOCUMENT.match(key))}
    return len(places) or None


def _fires(attributes: Mapping[str, Any]) -> bool:
    return any(value is True for key, value in attributes.items() if key.rpartition(".")[2] in FIRED)


def _object(text: str | None) -> Mapping[str, Any]:
    try:
        value = msgspec.json.decode(text or "null")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _first(attributes: Attributes, keys: Iterable[str]) -> str | None:
    value = next((attributes[key] for key in keys if attributes.get(key) is not None), None)
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _kept(attributes: Attributes) -> Attributes:
    kept: Attributes = {}
    for key, value in attributes.items():
        if key not in (*INPUTS, *OUTPUTS) and not DROPPED.match(key):
            kept[key] = value[:KEPT] if isinstance(value, str) else value
    return kept


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case None:
            return None
        case which:
            return getattr(value, which)
