"""What a logger is: it shows a run in a service, and cannot influence the run.

A logger is made at the start of the run, before anything is trained: there, it may raise `UserError`. Everything else
happens in a thread of its own (`follow.py`). If a method raises, the same records are given to it again; a logger that
keeps raising is dropped. Loggers use the environment variables of their service, and have no settings of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from lightningrl.loggers.notes import Notes
from lightningrl.types import FINAL, Attempt, Call, Reward, Rollout, Span

Ending: TypeAlias = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run to log."""

    name: str
    """Of its folder."""
    project: str
    """Name of the recipe: its runs belong together."""
    folder: Path
    settings: Mapping[str, Any]
    """All settings, nested as in the recipe; secrets are replaced."""
    notes: Notes
    """The logger's memory in the run's folder, e.g. for the id of the run in the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The metrics of a step or of an exam."""

    step: int
    """Number of steps taken: the first step has 1, an exam before training 0."""
    at: float
    """Unix seconds."""
    metrics: Mapping[str, float]
    """Name in `metrics.jsonl` → value; of an exam, the names begin with `heldout/sampled/` or `heldout/greedy/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rollout that has succeeded or failed, with the records of all attempts that were not logged yet."""

    rollout: Rollout
    attempts: tuple[Attempt, ...]
    calls: tuple[Call, ...]
    spans: tuple[Span, ...]
    """Those that telemetry recorded; `tracing.spans_of` derives others from the calls."""
    rewards: tuple[Reward, ...]

    @property
    def reward(self) -> float | None:
        """The final reward of the accepted attempt; None: the rollout failed. The grader's counts, as everywhere."""
        accepted = self.rollout.accepted_attempt_id
        final = [r for r in self.rewards if r.attempt_id == accepted and r.name == FINAL and r.call_id is None]
        by_grader = sorted(final, key=lambda reward: reward.source == "grader")
        return by_grader[-1].value if by_grader else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run has ended."""

    ending: Ending
    """`stopped`: by a signal. A run that stopped or failed can be resumed."""
    result: Mapping[str, Any]
    """Contents of `result.json`; empty unless the run is complete."""
    error: str
    """Message; "" unless the run failed."""


class Refused(Exception):
    """The service refuses the records for good, e.g. as the key is wrong. The logger is dropped at once."""


class Logger(Protocol):
    """Made without arguments. All methods are called in one thread, one after the other."""

    reads_rollouts: bool
    """Whether `rollouts` is of use: if not, no records are read for it."""

    def begin(self, run: Run) -> str:
        """Start the run in the service; if it is resumed, continue the same run there. Returns where it can be seen;
        "": nowhere in particular.
        """
        ...

    def log(self, row: Row) -> None:
        """A step or an exam, in order. Each is given once, also across restarts."""
        ...

    def rollouts(self, batch: Sequence[Ended]) -> None:
        """A few rollouts that have ended. They count as logged when this returns, and are then never given again."""
        ...

    def end(self, outcome: Outcome) -> str:
        """The run has ended; a run that is resumed begins and ends again. Returns what the user should know; "":
        nothing.
        """
        ...
