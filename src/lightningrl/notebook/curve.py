"""How did the reward develop? The steps and exams of a run, in order, as `metrics.jsonl` has them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from lightningrl.notebook.chart import chart
from lightningrl.notebook.html import heading, joined, line
from lightningrl.notebook.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One training step, or one exam on the held-out tasks."""

    kind: Literal["step", "exam"]
    step: int
    """Of a training step its number, from 1. Of an exam the number of steps before it."""
    mode: Literal["sampled", "greedy"] | None
    """How the exam decodes; None: not an exam."""
    reward: float
    """Mean reward."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval of the mean; None: not recorded."""
    metrics: Mapping[str, float]
    """Everything that was measured, by name: `policy/entropy`, `time/learn_s`, …"""

    def plain(self) -> dict[str, Any]:
        """The fields by name; each metric is a field of its own."""
        own = {name: getattr(self, name) for name in ("kind", "step", "mode", "reward", "low", "high")}
        return own | dict(self.metrics)


def points_of(
    rows: Iterable[Mapping[str, Any]], *, intervals: Mapping[int, tuple[float, float]] | None = None
) -> tuple[Point, ...]:
    """The rows of a `metrics.jsonl` that are steps or exams. `intervals`: step from 1 → 95 % interval of its reward."""
    return tuple(_point(row, intervals or {}) for row in rows if row["kind"] in ("step", "exam"))


def _point(row: Mapping[str, Any], intervals: Mapping[int, tuple[float, float]]) -> Point:
    trained = row["kind"] == "step"
    step = row["step"] + 1 if trained else row["step"]
    unknown = (row.get("reward/low"), row.get("reward/high"))
    low, high = intervals.get(step, unknown) if trained else unknown
    return Point(
        kind=row["kind"],
        step=step,
        mode=row.get("mode"),
        reward=row["reward/mean"],
        low=low,
        high=high,
        metrics={name: value for name, value in row.items() if "/" in name},
    )


def curve_of(points: tuple[Point, ...], *, steps: int) -> Rows[Point]:
    """The points; in a notebook they are a picture above a table. `steps`: of the whole run."""
    return Rows(
        points,
        plain=Point.plain,
        shown=("kind", "step", "mode", "reward", "low", "high"),
        above=lambda: picture(points, steps=steps),
        empty="no step is finished yet",
    )


def picture(points: Sequence[Point], *, steps: int) -> Markup:
    """The learning curve: training reward, and held-out reward as sampled."""
    return chart(
        [(point.step, point.reward) for point in points if point.kind == "step"],
        [(point.step, point.reward, point.low, point.high) for point in points if point.mode == "sampled"],
        steps=steps,
    )


def overview(path: Path, points: Sequence[Point], *, steps: int, result: Mapping[str, Any] | None) -> Markup:
    """A run in short: its name, how far it is, the learning curve, and what its result says; None: it has none yet."""
    facts = [f"{sum(point.kind == 'step' for point in points)} of {steps} steps"]
    if result is not None:
        facts.append(f"held-out reward {result['heldout_before']:.3f} → {result['heldout_after']:.3f}")
    told = [line(result["reason"])] if result is not None and result["reason"] else []
    return joined([heading(str(path), *facts), picture(points, steps=steps), *told])
