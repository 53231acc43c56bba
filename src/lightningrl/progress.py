"""What does a run report while it goes? Held-out exams, metrics of steps, and a line about the work at hand."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from lightningrl.types import Doubles, Rollout

Mode: TypeAlias = Literal["sampled", "greedy"]
MODES: tuple[Mode, ...] = ("sampled", "greedy")
TEMPERATURE: dict[Mode, float] = {"sampled": 1.0, "greedy": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """One evaluation of the policy on held-out tasks."""

    version: int
    """Of the weights that were evaluated."""
    mode: Mode
    rollouts: tuple[Rollout, ...]
    """One per task, in the order of the tasks."""
    rewards: Doubles
    """[tasks] the final rewards; NaN where a rollout failed."""

    @property
    def failed(self) -> int:
        """Number of rollouts without a reward."""
        return int(np.isnan(self.rewards).sum())

    @property
    def mean(self) -> float:
        """Mean reward of the rollouts that did not fail."""
        return float(np.nanmean(self.rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run: its exams before and after training."""

    before: dict[Mode, Exam]
    after: dict[Mode, Exam]
    rollouts: int
    """All rollouts in the store, exams included."""


class Watcher(Protocol):
    """Receives the progress of a run, e.g. to show it. It cannot influence the run."""

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """The run works on `what`, and has finished `done` of `total` parts; a `total` of 0: it has no parts."""
        ...

    def voided(self, step: int, why: str) -> None:
        """Branches of a step are void. `why`: which way the agent of one of them went. Before the step is complete."""
        ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """An optimizer step is complete. Steps count from 0."""
        ...

    def examined(self, exam: Exam) -> None: ...
