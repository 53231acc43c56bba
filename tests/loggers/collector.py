"""A collector of OTLP on a port of this machine, which keeps what it gets and can be told to refuse."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(kw_only=True)
class Collector:
    url: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    """Those that it acknowledged."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """(status, Retry-After) of the next answers."""
    rejected: int = 0
    """Spans that it says it rejects, of each request."""

    @property
    def spans(self) -> list[Span]:
        found = [
            scope.spans for request in self.requests for own in request.resource_spans for scope in own.scope_spans
        ]
        return [span for spans in found for span in spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers.append(dict(self.headers))
            collector.paths.append(self.path)
            status, after = collector.refusals.pop(0) if collector.refusals else (200, "")
            answer = ExportTraceServiceResponse()
            if status == 200:
                body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                answer.partial_success.rejected_spans = collector.rejected
                answer.partial_success.error_message = "too old" if collector.rejected else ""
            self.send_response(status)
            if after:
                self.send_header("Retry-After", after)
            self.end_headers()
            self.wfile.write(answer.SerializeToString())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(url=f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
