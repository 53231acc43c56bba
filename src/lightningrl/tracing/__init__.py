"""What happened in an attempt, as spans: derived from its calls, told by OpenTelemetry, or both at once."""

from lightningrl.tracing.derived import spans_of
from lightningrl.tracing.united import united

__all__ = ["spans_of", "united"]
