"""Show a run where people look already: Weights & Biases, Trackio, MLflow, TensorBoard, any collector of OTLP."""

from lightningrl.loggers.base import Ended, Logger, Outcome, Row, Run
from lightningrl.loggers.notes import Notes
from lightningrl.loggers.running import make_loggers, shown_by

__all__ = ["Ended", "Logger", "Notes", "Outcome", "Row", "Run", "make_loggers", "shown_by"]
