"""`lightningrl health RUN_DIR`: is what a run learns from healthy? Figures at its beginning and at its end, and
warnings in words.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from lightningrl.cli.console import say
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
    view,
    warnings_of,
)
from lightningrl.progress import Exam
from lightningrl.recipe import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One figure of the report on a run."""

    policy: str
    """Whose it is; empty: of the whole run, or of the only policy."""
    name: str
    """In words."""
    first: float
    last: float
    """Means over the first and the last steps."""
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
"""Metrics that are shares already."""


def signals_of(rows: Sequence[Row], learners: Mapping[str, LearnerConfig]) -> list[Signal]:
    """What there is to say about a run, at its beginning and at its end. Figures that all policies share are said once."""
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
    found: dict[str, tuple[list[float], Literal["share", "number"]]] = {}
    for words, name in rewards.items():
        found[words] = [mean_of(end, name) for end in ends], "number"
    for words, (part, whole) in SHARES.items():
        found[words] = [_part(end, part, whole) for end in ends], "share"
    for reason in reasons:
        found[f"tokens left out: `{reason}`"] = [left_out_shares(end).get(reason, 0.0) for end in ends], "share"
    for words, name in NUMBERS.items():
        found[words] = [mean_of(end, name) for end in ends], "number"
    for words, name in PARTS.items():
        found[words] = [mean_of(end, name) for end in ends], "share"
    return [
        Signal(policy=policy, name=words, first=first, last=last, kind=kind)
        for words, ((first, last), kind) in found.items()
        if not math.isnan(last)
    ]


def _part(rows: Sequence[Row], part: Sequence[str], whole: Sequence[str]) -> float:
    total = sum(row.get(name, 0.0) for row in rows for name in whole)
    return sum(row.get(name, 0.0) for row in rows for name in part) / total if total else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What there is to say about the steps of a run."""

    steps: int
    signals: tuple[Signal, ...]
    raised: tuple[tuple[int, str], ...]
    """(step, warning), in the order in which they were raised."""
    warnings: tuple[str, ...]
    """Those that are true at the end."""
    notes: tuple[str, ...]
    """What is worth knowing at the end, and nothing wrong."""

    @property
    def conclusive(self) -> bool:
        """Whether there were enough steps for all checks: most look at several steps together."""
        return self.steps >= RECENT

    def as_json(self) -> dict[str, Any]:
        """A figure that is not known is null."""
        signals = [
            {key: None if value != value else value for key, value in asdict(signal).items()} for signal in self.signals
        ]
        raised = [{"step": step, "warning": text} for step, text in self.raised]
        told = {"warnings": list(self.warnings), "notes": list(self.notes), "conclusive": self.conclusive}
        return {"steps": self.steps, "signals": signals, "raised": raised, **told}


def read(folder: Path) -> Checkup:
    """Of a run that is over, or is still going on. Raises `UserError` where there is none."""
    run = RunFolder(folder)
    if not run.config.exists():
        raise UserError(f"`{folder}` holds no run", hint="give the folder that `lightningrl train` has named")
    return checkup(run.rows(), load_config(run.config))


def checkup(rows: Sequence[Mapping[str, Any]], config: Config) -> Checkup:
    """Of the rows of a `metrics.jsonl`."""
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
    """A watcher that warns as soon as something is wrong. `before`: the steps that a resumed run has taken already."""

    def __init__(self, console: Console, config: Config, *, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self._console = console
        self._health = Health(config.learners())
        for row in steps_of(before):
            self._health.stepped(row)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        for warning in self._health.stepped(metrics):
            _advise(self._console, (f"step {step + 1}: warning: ", "bold yellow"), warning)

    def examined(self, exam: Exam) -> None:
        pass


def steps_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Of the rows of a `metrics.jsonl` those that are steps, without what only names them."""
    return [{name: value for name, value in row.items() if "/" in name} for row in rows if row["kind"] == "step"]


def show(found: Checkup, console: Console) -> None:
    """A table for a person, what is still wrong, and whether that can be told at all."""
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
        _advise(console, ("warning: ", "bold yellow"), warning)
    for note in found.notes:
        _advise(console, ("note: ", "bold green"), note)
    if not found.conclusive:
        say(console, ("too short to tell: ", "bold yellow"), _too_short(found.steps))
    elif not found.warnings:
        say(console, ("nothing is wrong with what it learns from", "green"))


def _too_short(steps: int) -> str:
    if not steps:
        return "no step has been taken, so nothing could be checked"
    return (
        f"most checks look at {RECENT} steps together, and there {'is' if steps == 1 else 'are'} {steps}. "
        "Checked already: whether updates are finite, engine and trainer agree, rewards that are named are given, and not all groups are silent"
    )


def _advise(console: Console, label: tuple[str, str], advice: str) -> None:
    """A text and what can be done, which stands behind `; hint: `."""
    text, _, hint = advice.partition("; hint: ")
    say(console, label, text)
    say(console, ("  hint: ", "yellow"), hint)


def _figure(value: float, kind: str) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.1%}" if kind == "share" else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
