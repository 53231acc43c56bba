"""What happened in an attempt, as spans: derived from its calls, or told by OpenTelemetry."""

from lightningrl.tracing.derived import spans_of

__all__ = ["spans_of"]
