"""The spans of an attempt: derived from its calls, reported by OpenTelemetry, or both united."""

from lightningrl.tracing.derived import spans_of
from lightningrl.tracing.united import united

__all__ = ["spans_of", "united"]
