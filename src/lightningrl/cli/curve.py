"""`curve.png`: reward over steps, on training tasks and on held-out ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, TRAIN, HELDOUT = "#1b1f24", "#9db8d9", "#0a7d4b"


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the rows of a `metrics.jsonl`."""
    import matplotlib  # an extra, and slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row for row in rows if row["kind"] == "step"]
    exams = [row for row in rows if row["kind"] == "exam" and row["mode"] == "sampled"]
    greedy = [row for row in rows if row["kind"] == "exam" and row["mode"] == "greedy"]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    axes.plot([row["step"] + 1 for row in steps], [row["reward/mean"] for row in steps], color=TRAIN, lw=1.5, label="training tasks (sampled)")
    axes.plot([row["step"] for row in exams], [row["reward/mean"] for row in exams], color=HELDOUT, lw=2.5, marker="o", ms=5, label="held-out tasks (sampled)")
    axes.scatter([row["step"] for row in greedy], [row["reward/mean"] for row in greedy], color=INK, marker="D", s=28, zorder=3, label="held-out tasks (greedy)")
    for row, offset in zip((exams[0], exams[-1]), ((8, -14), (-8, 10)), strict=True) if len(exams) > 1 else ():
        axes.annotate(f"{row['reward/mean']:.2f}", (row["step"], row["reward/mean"]), textcoords="offset points", xytext=offset, color=HELDOUT, weight="bold")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title=title)
    axes.grid(axis="y", color="#e4e7eb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
