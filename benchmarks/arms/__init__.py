"""Compare ways of training: arms that differ only in settings, each run with several seeds, with 95 % intervals."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for a 95 % interval, by degrees of freedom."""

Run = Mapping[str, Any]
"""The result of `lightningrl train`; `curve`: [step, mean reward] of each held-out evaluation at T = 1; `tokens`: the
sampled tokens of all steps, without those of evaluations.
"""


def once(path: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON in `path`; if it is not there, `make` makes it first."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make()) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def spent(*command: str | Path) -> dict[str, float]:
    """Wall-clock and CPU seconds of a command and its children. Raises if the command fails."""
    began = time.monotonic()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(usage.ru_utime + usage.ru_stime, 1)}


def train(recipe: Path, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """The figures of one run, without texts such as paths. It only runs if `folder` has no result."""
    result = folder / "result.json"
    if not result.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        seconds = spent(sys.executable, "-m", "lightningrl", "train", recipe, *overrides, "--run-dir", folder, "--json")
        (folder / "spent.json").write_text(json.dumps(seconds) + "\n", encoding="utf-8")
    figures = {
        name: value
        for name, value in json.loads(result.read_text(encoding="utf-8")).items()
        if not isinstance(value, str)
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [[row["step"], row["reward/mean"]] for row in rows if row["kind"] == "exam" and row["mode"] == "sampled"]
    tokens = sum(row["tokens/sampled"] for row in rows if row["kind"] == "step")
    return {**figures, "tokens": int(tokens), "curve": curve}


def runs_of(
    names: Iterable[str], seeds: Iterable[int], run: Callable[[str, int], dict[str, Any]], *, jobs: int
) -> dict[str, list[dict[str, Any]]]:
    """Name → its run with each seed, `jobs` at a time. Goes seed by seed, so that arms compare if it is stopped."""
    wanted = [(name, seed) for seed in seeds for name in names]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(zip(wanted, pool.map(lambda arm: run(*arm), wanted), strict=True))
    return {name: [made for (of, _), made in found if of == name] for name in names}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval; 0 for a single value."""
    if len(values) < 2:
        return mean(values), 0.0
    return mean(values), T95[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def area(run: Run) -> float:
    """Mean reward over all evaluations but the first. It rewards fast learning, and averages over noise."""
    return mean(reward for _, reward in run["curve"][1:])


COLUMNS = ("over training", "at the end", "greedy at the end")


def table(arms: Mapping[str, Sequence[Run]]) -> str:
    """A table with the mean and the 95 % interval of each arm."""
    lines = [f"{'held-out reward':<26}" + "".join(f"{column:>20}" for column in COLUMNS) + f"{'seconds':>9}{'runs':>6}"]
    for name, runs in arms.items():
        columns = [
            [area(run) for run in runs],
            *([run[key] for run in runs] for key in ("heldout_after", "heldout_greedy_after")),
        ]
        cells = "".join("{:>20}".format("{:.3f} ± {:.3f}".format(*interval(values))) for values in columns)
        lines.append(f"{name:<26}{cells}{mean(run['seconds'] for run in runs):>9.0f}{len(runs):>6}")
    return "\n".join(lines)


def draw_curves(axes: Any, arms: Mapping[str, Sequence[Run]], colours: Mapping[str, str]) -> None:
    """Plot the mean and the 95 % band of each arm, with its name at the end."""
    ends: list[tuple[float, str]] = []
    last, top = 1.0, 0.0
    for name, runs in arms.items():
        steps = [step for step, _ in runs[0]["curve"]]
        columns = np.array([[reward for _, reward in run["curve"]] for run in runs]).T
        middle, half = np.array([interval(column.tolist()) for column in columns]).T
        axes.plot(steps, middle, color=colours[name], lw=2.2, zorder=3)
        axes.fill_between(steps, middle - half, middle + half, color=colours[name], alpha=0.14, lw=0)
        ends.append((float(middle[-1]), name))
        last, top = max(last, steps[-1]), max(top, float((middle + half).max()))
    top = min(1.0, math.ceil(10 * top + 0.5) / 10)
    for place, name in _apart(sorted(ends), 0.05 * top):
        axes.annotate(
            name,
            (1.015, place),
            xycoords=("axes fraction", "data"),
            color=colours[name],
            va="center",
            fontsize=9.5,
            annotation_clip=False,
        )
    axes.set(xlabel="step", ylabel="reward on held-out tasks (T = 1)", ylim=(0, top), xlim=(0, last))
    tidy(axes, grid="y")


def draw_alone(axes: Any, name: str, arms: Mapping[str, Sequence[Run]], *, colour: str = "#0a7d4b") -> None:
    """Plot one arm's mean and single runs, in front of the other arms' means."""
    steps = [step for step, _ in arms[name][0]["curve"]]
    curves = {of: np.array([[reward for _, reward in run["curve"]] for run in runs]) for of, runs in arms.items()}
    for of in curves:
        axes.plot(steps, curves[of].mean(axis=0), color="#d0d7de", lw=1.6)
    for run in curves[name]:
        axes.plot(steps, run, color=colour, lw=0.8, alpha=0.45)
    axes.plot(steps, curves[name].mean(axis=0), color=colour, lw=2.4)
    top = math.ceil(10 * max(curve.max() for curve in curves.values()) + 0.5) / 10
    axes.set(xlabel="step", ylabel="held-out reward (T = 1)", ylim=(0, min(1.0, top)), xlim=(0, steps[-1]))
    tidy(axes, grid="y")


def draw_rows(
    axes: Any, rows: Mapping[str, Sequence[float]], colours: Mapping[str, str], *, order: Sequence[str]
) -> None:
    """Plot a mean, its 95 % interval and the single runs in each row; the first of `order` is at the bottom."""
    for place, name in enumerate(order):
        middle, half = interval(rows[name])
        axes.errorbar(middle, place, xerr=half, color=colours[name], marker="o", ms=6, lw=2, capsize=3, zorder=3)
        axes.scatter(rows[name], [place - 0.24] * len(rows[name]), color=colours[name], alpha=0.4, s=10, lw=0)
    axes.set_yticks(range(len(order)), order)
    axes.set(ylim=(-0.6, len(order) - 0.4))
    axes.tick_params(axis="y", length=0)
    tidy(axes, grid="x")
    axes.spines["left"].set_visible(False)


def tidy(axes: Any, *, grid: str) -> None:
    axes.grid(axis=grid, color="#e4e7eb")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _apart(labels: Sequence[tuple[float, str]], gap: float) -> list[tuple[float, str]]:
    """Move labels apart so that none overlap, as far up as down."""
    placed: list[tuple[float, str]] = []
    for place, name in labels:
        placed.append((max(place, placed[-1][0] + gap) if placed else place, name))
    shift = mean(moved - place for (moved, _), (place, _) in zip(placed, labels, strict=True))
    return [(place - shift, name) for place, name in placed]
