"""OTLP: rollouts as traces, to any collector. `OTEL_EXPORTER_OTLP_*` says where.

The text of tasks, prompts, answers and errors is left out unless OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT is
`true`. A rollout is sent when it has ended, and never again after the collector has acknowledged it.
"""

import secrets
from collections.abc import Iterator, Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from lightningrl.loggers.base import Ended, Outcome, Row, Run
from lightningrl.loggers.content import content_allowed
from lightningrl.loggers.otlp_send import collector, send
from lightningrl.loggers.otlp_spans import SCHEMA, resource, scope, spans_of_rollout

LIMIT = 4 * 1024 * 1024
"""Size of a request, in bytes: a fifth of what the OpenTelemetry Collector accepts. A larger span is sent alone."""


class OTLP:
    reads_rollouts = True

    def __init__(self) -> None:
        self._collector, self._texts = collector(), content_allowed()
        self._acknowledged = set[bytes]()
        """Ids of spans of the present batch: some of its requests may fail."""
        self._sent = self._rejected = 0
        self._why = ""

    def begin(self, run: Run) -> str:
        salt = run.notes.read("salt") or secrets.token_hex(8)  # runs may have equal names
        run.notes.write({"salt": salt})
        self._run, self._salt, self._resource = run.name, salt, resource(run)
        return f"spans go to {self._collector.place}"

    def log(self, row: Row) -> None:
        pass

    def rollouts(self, batch: Sequence[Ended]) -> None:
        spans = [
            span
            for ended in batch
            for span in spans_of_rollout(ended, run=self._run, salt=self._salt, texts=self._texts)
        ]
        left = [span for span in spans if span.trace_id + span.span_id not in self._acknowledged]
        for part in _parts(left):
            rejected, why = send(self._request(part), self._collector)
            self._acknowledged.update(span.trace_id + span.span_id for span in part)
            self._sent += len(part) - rejected
            self._rejected, self._why = self._rejected + rejected, why or self._why
        self._acknowledged.clear()

    def end(self, outcome: Outcome) -> str:
        refused = f", and it rejected {self._rejected:,}: {self._why}" if self._rejected else ""
        return f"{self._sent:,} spans are at {self._collector.place}{refused}"

    def _request(self, spans: Sequence[trace_pb2.Span]) -> bytes:
        request = ExportTraceServiceRequest()
        of_resource = request.resource_spans.add(resource=self._resource, schema_url=SCHEMA)
        of_resource.scope_spans.add(scope=scope(), schema_url=SCHEMA, spans=spans)
        return request.SerializeToString()


def _parts(spans: Sequence[trace_pb2.Span]) -> Iterator[list[trace_pb2.Span]]:
    """The spans in requests of at most `LIMIT` bytes."""
    part, size = list[trace_pb2.Span](), 0
    for span in spans:
        own = span.ByteSize()
        if part and size + own > LIMIT:
            yield part
            part, size = [], 0
        part.append(span)
        size += own
    if part:
        yield part
