"""`curve.png`: reward over steps, on training and on held-out tasks, drawn during a run and at its end."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from lightningrl.cli.folder import RunFolder
from lightningrl.cpu import DRAWING
from lightningrl.progress import Exam

INK, TRAIN, HELDOUT = "#1b1f24", "#9db8d9", "#0a7d4b"
SHARE = 0.02
"""Largest share of the run's time spent on drawing: a drawing that takes 0.3 s is repeated after 15 s."""


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, *, title: str, steps: int) -> None:
    """Draw the rows of a `metrics.jsonl` of a run with `steps` steps. The file is replaced atomically."""
    from matplotlib.figure import Figure  # an extra, and slow to load
    from matplotlib.ticker import MaxNLocator

    def points(kind: str, mode: str | None = None) -> tuple[list[int], list[float]]:
        """(steps taken, rewards)"""
        chosen = [row for row in rows if row["kind"] == kind and row.get("mode") == mode]
        return [row["step"] for row in chosen], [row["reward/mean"] for row in chosen]

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    x, y = points("step")
    axes.plot(x, y, color=TRAIN, lw=1.5, label=_label("training tasks, sampled", y))
    x, y = points("exam", "sampled")
    label = _label("held-out tasks, sampled", y)
    axes.plot(x, y, color=HELDOUT, lw=2.5, marker="o", ms=6, clip_on=False, zorder=3, label=label)
    x, y = points("exam", "greedy")
    axes.scatter(x, y, color=INK, marker="D", s=30, clip_on=False, zorder=4, label=_label("held-out tasks, greedy", y))
    axes.set(xlabel="step", ylabel="reward", xlim=(0, max(steps, 1)))
    axes.set_title(title, loc="left", weight="bold", pad=12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(0 <= row["reward/mean"] <= 1 for row in rows if "reward/mean" in row):
        axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#e4e7eb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    draft = path.with_suffix(".draft.png")
    figure.savefig(draft)
    draft.replace(path)


def _label(name: str, rewards: Sequence[float]) -> str:
    """The name with the first and the last reward; numbers beside the points would cover the lines."""
    if not rewards:
        return name
    ends = rewards if len(rewards) == 1 else (rewards[0], rewards[-1])
    return f"{name}: " + " → ".join(f"{reward:.2f}" for reward in ends)


class CurveWatcher:
    """A watcher that draws the curve during the run, in a thread of its own."""

    def __init__(
        self, folder: RunFolder, *, title: str, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._title, self._steps, self._clock = folder, title, steps, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=DRAWING)
        self._drawing: Future[None] | None = None
        self._due = -float("inf")

    def __enter__(self) -> "CurveWatcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def voided(self, step: int, why: str) -> None:
        pass

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._draw_if_due()

    def examined(self, exam: Exam) -> None:
        self._draw_if_due()

    def _draw_if_due(self) -> None:
        busy = self._drawing is not None and not self._drawing.done()
        if not busy and self._clock() >= self._due:
            self._drawing = self._thread.submit(self._draw)

    def _draw(self) -> None:
        began = self._clock()
        draw_curve(self._folder.rows(), self._folder.curve, title=self._title, steps=self._steps)
        now = self._clock()
        self._due = now + (now - began) / SHARE
