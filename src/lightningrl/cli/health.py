"""`lightningrl health RUN_DIR`: metrics at the beginning and at the end of a run, and warnings."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lightningrl.cli.console import advise, say
from lightningrl.config import Config
from lightningrl.health import RECENT, Health
from lightningrl.look.checkup import Checkup, example_of, steps_of
from lightningrl.progress import Exam


class HealthWatcher:
    """A watcher that prints new warnings, and the first example of a void branch. `before`: rows of `metrics.jsonl`
    from before a resume.
    """

    def __init__(self, console: Console, config: Config, *, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self._console = console
        self._health = Health(config.learners())
        for row in steps_of(before):
            self._health.stepped(row)
        self._example = example_of(before)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def voided(self, step: int, why: str) -> None:
        if self._example is None:
            self._example = why
            advise(self._console, f"step {step + 1}: void branch", "yellow", why)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        for warning in self._health.stepped(metrics):
            advise(self._console, f"step {step + 1}: warning", "bold yellow", warning)

    def examined(self, exam: Exam) -> None:
        pass


def show(found: Checkup, console: Console) -> None:
    """Print the report: a table, warnings, notes and a conclusion."""
    table = Table(title=f"Signal health, {found.steps} steps", title_justify="left", title_style="bold")
    table.caption, table.caption_justify = f"means of {min(RECENT, found.steps)} steps", "left"
    several = any(signal.policy for signal in found.signals)
    for column in (*(("policy",) if several else ()), "signal", "first", "last"):
        table.add_column(column, justify="right" if column in ("first", "last") else "left")
    for policy, signals in itertools.groupby(found.signals, key=lambda signal: signal.policy):
        table.add_section()
        for index, signal in enumerate(signals):
            figures = [_figure(value, signal.kind) for value in (signal.first, signal.last)]
            table.add_row(*([policy if index == 0 else ""] if several else []), signal.name.replace("`", ""), *figures)
    if found.signals:
        console.print(table)
    for warning in found.warnings:
        advise(console, "warning", "bold yellow", warning.text)
    if found.void:
        advise(console, "a void branch", "yellow", found.void)
    for note in found.notes:
        advise(console, "note", "bold green", note.text)
    if not found.conclusive:
        say(console, ("too short to tell: ", "bold yellow"), _too_short(found.steps))
    elif not found.warnings:
        say(console, ("no warnings: the run is healthy", "green"))


def _too_short(steps: int) -> str:
    if not steps:
        return "no step is finished, so nothing could be checked"
    return (
        f"most checks look at {RECENT} steps together, and the run has {steps}. Checked so far: updates are finite, "
        "engine and trainer agree, named rewards are given, and not all groups are silent"
    )


def _figure(value: float, kind: str) -> str:
    if math.isnan(value):
        return "–"
    if kind == "share":
        return f"{value:.1%}"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
