"""The spans of an attempt: derived from its calls, reported by OpenTelemetry, or both united."""

from lightningrl.tracing.derived import spans_of
from lightningrl.tracing.united import call_during, united

__all__ = ["call_during", "spans_of", "united"]
