"""How does a request reach a collector? OTLP over HTTP with protobuf, as the OpenTelemetry protocol 1.5 says.

https://opentelemetry.io/docs/specs/otlp/#otlphttp and https://opentelemetry.io/docs/specs/otel/protocol/exporter/: 429,
502, 503, 504 and lost connections are tried again, after the time that the server asks for, or after growing times;
any other refusal is final.
"""

import gzip
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from lightningrl.errors import UserError
from lightningrl.loggers.base import Refused

AGAIN = (429, 502, 503, 504)
WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Times between tries, in seconds; each is varied by a quarter, so that several runs do not come together."""
LONGEST_S = 60.0
"""Longest wait that a server can ask for, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Where spans go, from the standard environment variables."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    """Of one request."""
    compressed: bool
    tls: ssl.SSLContext | None
    """None: plain HTTP, or the system's certificates."""

    @property
    def place(self) -> str:
        """The URL without what may be a secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class Unsent(Exception):
    """The collector could not be reached, or is overloaded."""


def collector() -> Collector:
    """The collector that `OTEL_EXPORTER_OTLP_*` names; by default one on this machine. Raises `UserError`."""
    protocol = _variable("PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        hint = "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, and the endpoint for it, usually port 4318"
        raise UserError(f"the logger `otlp` does not speak `{protocol}`", hint=hint)
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or f"{base.rstrip('/')}/v1/traces"
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        hint = "set OTEL_EXPORTER_OTLP_ENDPOINT, e.g. to http://localhost:4318"
        raise UserError(f"`{url}` is no endpoint for the logger `otlp`", hint=hint)
    timeout = _variable("TIMEOUT") or "10000"
    if not timeout.isdecimal() or not int(timeout):
        hint = "set OTEL_EXPORTER_OTLP_TIMEOUT to milliseconds, e.g. 10000"
        raise UserError(f"`{timeout}` is no timeout for the logger `otlp`", hint=hint)
    return Collector(
        url=url,
        headers=_headers(_variable("HEADERS")),
        timeout_s=int(timeout) / 1000,
        compressed=_variable("COMPRESSION") == "gzip",
        tls=_tls(),
    )


def send(body: bytes, to: Collector, *, waits_s: tuple[float, ...] = WAITS_S) -> tuple[int, str]:
    """Send an `ExportTraceServiceRequest`. Returns (number of rejected spans, why). Raises `Unsent`, `Refused`."""
    headers = {"Content-Type": "application/x-protobuf", "User-Agent": "lightningrl", **to.headers}
    if to.compressed:
        body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
    request = urllib.request.Request(to.url, body, headers, method="POST")
    for wait_s in (*waits_s, None):
        asked_s = 0.0
        try:
            with urllib.request.urlopen(request, timeout=to.timeout_s, context=to.tls) as response:
                return _rejected(response.read())
        except urllib.error.HTTPError as refusal:
            said = f"{to.place} answered {refusal.code}"
            if refusal.code not in AGAIN:
                raise Refused(f"{said} {refusal.reason}") from refusal
            asked = refusal.headers.get("Retry-After") or ""
            asked_s = min(float(asked), LONGEST_S) if asked.isdecimal() else 0.0
            problem = Unsent(said)
        except OSError as error:  # also a timeout
            problem = Unsent(f"{to.place}: {error}")
        if wait_s is None:
            raise problem
        time.sleep(asked_s or wait_s * _jitter.uniform(0.75, 1.25))
    raise AssertionError("unreachable")


_jitter = random.Random()
"""Not the global generator: a run's randomness stays as it is."""


def _variable(name: str) -> str:
    """The variable for traces, or else the one for all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def _headers(text: str) -> dict[str, str]:
    """`key=value,key=value`, with values encoded as in a URL."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not name.strip() or not equals for name, equals, _ in pairs):
        hint = "write OTEL_EXPORTER_OTLP_HEADERS as `name=value,name=value`"
        raise UserError("the headers for the logger `otlp` cannot be read", hint=hint)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def _tls() -> ssl.SSLContext | None:
    authority, certificate, key = (_variable(name) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"))
    if not authority and not certificate:
        return None
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except OSError as error:
        hint = "check OTEL_EXPORTER_OTLP_CERTIFICATE, …_CLIENT_CERTIFICATE and …_CLIENT_KEY"
        raise UserError(f"the certificates for the logger `otlp` cannot be read: {error}", hint=hint) from error
    return context


def _rejected(body: bytes) -> tuple[int, str]:
    """Some collectors answer with JSON, or with nothing."""
    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message
