"""`lightningrl health RUN_DIR`: metrics at the beginning and at the end of a run, and warnings."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from lightningrl.cli.console import advise, say
from lightningrl.cli.folder import RunFolder
from lightningrl.config import Config, LearnerConfig
from lightningrl.errors import UserError
from lightningrl.health import (
    CALLS,
    NO_REWARDS,
    RECENT,
    Health,
    Row,
    left_out_shares,
    mean_of,
    notes_of,
    share_of,
    view,
    warnings_of,
)
from lightningrl.progress import Exam
from lightningrl.recipe import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One row of the report."""

    policy: str
    """Name of the policy; empty for the whole run, or for the only policy."""
    name: str
    """A description for people."""
    first: float
    last: float
    """Mean over the first and over the last `RECENT` steps."""
    kind: Literal["share", "number"]


SHARES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "rollouts that failed": (["rollouts/excluded"], ["rollouts/excluded", "rollouts/succeeded"]),
    "calls cut off": (["calls/truncated"], CALLS),
    "calls with a rewritten history": (["calls/forked", "calls/partly"], CALLS),
    "groups that teach nothing": (["groups/silent"], ["groups/count"]),
}
NUMBERS: Mapping[str, str] = {
    "calls of a rollout": "calls/per_rollout",
    "tokens of a call": "tokens/per_call",
    "spread of rewards in a group": "reward/std_in_group",
    "advantage, mean": "advantage/mean",
    "advantage, deviation": "advantage/std",
    "advantage, largest": "advantage/max",
    "entropy (nats a token)": "policy/entropy",
    "ratio, mean": "loss/ratio_mean",
    "ratio, largest": "loss/ratio_max",
    "KL, trainer from engine": "policy/kl_engine",
    "logprobs, largest gap": "policy/logprob_gap",
    "KL, from the start": "loss/kl",
    "gradient norm": "optim/grad_norm",
}
PARTS: Mapping[str, str] = {
    "tokens clipped": "loss/clip_fraction",
    "tokens beyond the cap": "loss/importance_capped",
    "updates skipped": "optim/skipped",
    "variance the critic explains": "critic/explained_variance",
}
"""Metrics that are already shares."""


def signals_of(rows: Sequence[Row], learners: Mapping[str, LearnerConfig]) -> list[Signal]:
    """The rows of the report. Metrics that all policies share appear once."""
    shared = _signals(rows, policy="")
    if len(learners) < 2:
        return shared
    known = {signal.name for signal in shared}
    own = [signal for name in learners for signal in _signals([view(row, name) for row in rows], policy=name)]
    return [*shared, *(signal for signal in own if signal.name not in known)]


def _signals(rows: Sequence[Row], *, policy: str) -> list[Signal]:
    ends = (rows[:RECENT], rows[-RECENT:])
    names = list(dict.fromkeys(name for row in rows for name in row))
    rewards = {
        f"reward `{name.removeprefix('reward/')}`": name
        for name in names
        if name.startswith("reward/") and name not in NO_REWARDS
    }
    reasons = sorted({reason for end in ends for reason in left_out_shares(end)})
    signals: list[Signal] = []

    def add(words: str, kind: Literal["share", "number"], of: Callable[[Sequence[Row]], float]) -> None:
        first, last = map(of, ends)
        if not math.isnan(last):
            signals.append(Signal(policy=policy, name=words, first=first, last=last, kind=kind))

    for words, name in rewards.items():
        add(words, "number", partial(mean_of, name=name))
    for words, (part, whole) in SHARES.items():
        add(words, "share", partial(share_of, part=part, whole=whole))
    for reason in reasons:
        add(f"tokens left out: `{reason}`", "share", lambda end, reason=reason: left_out_shares(end).get(reason, 0.0))
    for words, name in NUMBERS.items():
        add(words, "number", partial(mean_of, name=name))
    for words, name in PARTS.items():
        add(words, "share", partial(mean_of, name=name))
    return signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The report on a run."""

    steps: int
    signals: tuple[Signal, ...]
    raised: tuple[tuple[int, str], ...]
    """(step, warning), in the order they were raised."""
    warnings: tuple[str, ...]
    """Warnings that are true at the end."""
    notes: tuple[str, ...]
    """Notes at the end that are not warnings."""

    @property
    def conclusive(self) -> bool:
        """Whether the run has enough steps for all checks."""
        return self.steps >= RECENT

    def as_json(self) -> dict[str, Any]:
        """The report as JSON; NaN becomes null."""
        signals = [asdict(signal) for signal in self.signals]
        for signal in signals:
            signal["first"] = None if math.isnan(signal["first"]) else signal["first"]
        raised = [{"step": step, "warning": text} for step, text in self.raised]
        told = {"warnings": list(self.warnings), "notes": list(self.notes), "conclusive": self.conclusive}
        return {"steps": self.steps, "signals": signals, "raised": raised, **told}


def read(folder: Path) -> Checkup:
    """The report on a finished or unfinished run. Raises `UserError` if the folder has no run."""
    run = RunFolder(folder)
    if not run.config.exists() and (folder / "store.sqlite").exists():
        hint = f"`lightningrl rollouts {folder} --report` shows what was captured"
        raise UserError(f"`{folder}` has no training metrics", hint=hint)
    if not run.config.exists():
        raise UserError(f"`{folder}` holds no run", hint="give the folder that `lightningrl train` printed")
    return checkup(run.rows(), load_config(run.config))


def checkup(rows: Sequence[Mapping[str, Any]], config: Config) -> Checkup:
    """The report on the rows of a `metrics.jsonl`."""
    learners = config.learners()
    health = Health(learners)
    metrics = steps_of(rows)
    raised = [(step, text) for step, row in enumerate(metrics) for text in health.stepped(row)]
    return Checkup(
        steps=len(metrics),
        signals=tuple(signals_of(metrics, learners)),
        raised=tuple(raised),
        warnings=tuple(warnings_of(metrics, learners)),
        notes=tuple(notes_of(metrics, learners)),
    )


class HealthWatcher:
    """A watcher that prints new warnings. `before`: rows of `metrics.jsonl` from before a resume."""

    def __init__(self, console: Console, config: Config, *, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self._console = console
        self._health = Health(config.learners())
        for row in steps_of(before):
            self._health.stepped(row)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        for warning in self._health.stepped(metrics):
            advise(self._console, f"step {step + 1}: warning", "bold yellow", warning)

    def examined(self, exam: Exam) -> None:
        pass


def steps_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The steps among the rows of a `metrics.jsonl`; only their metrics are kept."""
    return [{name: value for name, value in row.items() if "/" in name} for row in rows if row["kind"] == "step"]


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
        advise(console, "warning", "bold yellow", warning)
    for note in found.notes:
        advise(console, "note", "bold green", note)
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
