"""What happened in a run, and when: its starts and resumes, and the warnings about its signal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightningrl.config import LearnerConfig
from lightningrl.health import Health
from lightningrl.look.checkup import steps_of
from lightningrl.look.journal import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event."""

    step: int
    """As in `metrics.jsonl`: from 0."""
    kind: Literal["began", "resumed", "warning"]
    text: str
    at: float | None
    """Unix seconds; None: not recorded."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Events:
    """The events of a run that may go on."""

    def __init__(self, learners: Mapping[str, LearnerConfig]) -> None:
        self._health = Health(learners)
        self.found: list[Event] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Look at the next rows of `metrics.jsonl`."""
        for row in rows:
            step, at = row["step"], row.get("at")
            if row["kind"] == "began":
                again = step > 0 or any(event.kind == "began" for event in self.found)
                text = "the run was resumed" if again else "the run began"
                self.found.append(Event(step=step, kind="resumed" if again else "began", text=text, at=at))
            for metrics in steps_of([row]):
                warnings = self._health.stepped(metrics)
                self.found += [Event(step=step, kind="warning", text=text, at=at) for text in warnings]
