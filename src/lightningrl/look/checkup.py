"""How healthy is the training signal of a run? Metrics at its beginning and at its end, warnings and notes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightningrl.config import Config, LearnerConfig
from lightningrl.errors import UserError
from lightningrl.health import (
    CALLS,
    NO_REWARDS,
    RECENT,
    Advice,
    Health,
    Row,
    left_out_shares,
    mean_of,
    notes_of,
    own_name,
    share_of,
    view,
    warnings_of,
)
from lightningrl.look.journal import MetricsFile
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
    metric: str
    """The metric whose curve shows it."""


Kind: TypeAlias = Literal["share", "number"]
Measure: TypeAlias = tuple[str, Kind, str, Callable[[Sequence[Row]], float]]
"""(description, kind, metric, function from steps to the value)"""

SHARES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "rollouts that failed": (["rollouts/excluded"], ["rollouts/excluded", "rollouts/succeeded"]),
    "calls cut off": (["calls/truncated"], CALLS),
    "calls with a rewritten history": (["calls/forked", "calls/partly"], CALLS),
    "groups that teach nothing": (["groups/silent"], ["groups/count"]),
    "branches that are void": (["forks/void"], ["forks/branches"]),
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
    signals: list[Signal] = []
    for name, kind, metric, of in _measures(ends):
        first, last = map(of, ends)
        if not math.isnan(last):
            curve = own_name(metric, rows, policy) or metric
            signals.append(Signal(policy=policy, name=name, first=first, last=last, kind=kind, metric=curve))
    return signals


def _measures(ends: Sequence[Sequence[Row]]) -> Iterator[Measure]:
    names = list(dict.fromkeys(name for end in ends for row in end for name in row))
    for name in names:
        if name.startswith("reward/") and name not in NO_REWARDS:
            yield f"reward `{name.removeprefix('reward/')}`", "number", name, partial(mean_of, name=name)
    for words, (part, whole) in SHARES.items():
        yield words, "share", part[0], partial(share_of, part=part, whole=whole)
    for reason in sorted({reason for end in ends for reason in left_out_shares(end)}):
        yield f"tokens left out: `{reason}`", "share", f"tokens/left_out_{reason}", partial(_left_out, reason=reason)
    for words, name in NUMBERS.items():
        yield words, "number", name, partial(mean_of, name=name)
    for words, name in PARTS.items():
        yield words, "share", name, partial(mean_of, name=name)


def _left_out(rows: Sequence[Row], *, reason: str) -> float:
    return left_out_shares(rows).get(reason, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The report on a run."""

    steps: int
    signals: tuple[Signal, ...]
    raised: tuple[tuple[int, str], ...]
    """(step, warning), in the order they were raised."""
    warnings: tuple[Advice, ...]
    """Warnings that are true at the end."""
    notes: tuple[Advice, ...]
    """Notes at the end that are not warnings."""
    void: str | None = None
    """Why one of the branches is void; None: none is."""

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
        warnings, notes = ([advice.text for advice in found] for found in (self.warnings, self.notes))
        told = {"warnings": warnings, "notes": notes, "void": self.void, "conclusive": self.conclusive}
        return {"steps": self.steps, "signals": signals, "raised": raised, **told}

    def for_page(self) -> dict[str, Any]:
        """The same for the page, which shows warnings and notes beside the curves of their metrics."""
        return {
            **self.as_json(),
            "warnings": [_advice_json(advice) for advice in self.warnings],
            "notes": [_advice_json(advice) for advice in self.notes],
        }


def _advice_json(advice: Advice) -> dict[str, str | None]:
    text, _, hint = advice.text.partition("; hint: ")
    return {"text": text, "hint": hint or None, "metric": advice.metric}


def checkup_of(folder: Path) -> Checkup:
    """The report on a finished or unfinished run. Raises `UserError` if the folder has no run."""
    file = folder / "config.toml"
    if not file.exists() and (folder / "store.sqlite").exists():
        hint = f"`lightningrl rollouts {folder} --report` shows what was captured"
        raise UserError(f"`{folder}` has no training metrics", hint=hint)
    if not file.exists():
        raise UserError(f"`{folder}` holds no run", hint="give the folder that `lightningrl train` printed")
    return checkup(MetricsFile(folder / "metrics.jsonl").rows(), load_config(file))


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
        void=example_of(rows),
    )


def example_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The latest example of a void branch among the rows of a `metrics.jsonl`."""
    return next((row["why"] for row in reversed(rows) if row["kind"] == "void"), None)


def steps_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The steps among the rows of a `metrics.jsonl`; only their metrics are kept."""
    return [{name: value for name, value in row.items() if "/" in name} for row in rows if row["kind"] == "step"]
