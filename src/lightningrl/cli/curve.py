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

    def points(kind: str, mode: str | None = None) -> tuple[list[int], list[float]]:
        """Steps taken, and the reward there."""
        chosen = [row for row in rows if row["kind"] == kind and row.get("mode") == mode]
        return [row["step"] + (kind == "step") for row in chosen], [row["reward/mean"] for row in chosen]

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    axes.plot(*points("step"), color=TRAIN, lw=1.5, label="training tasks (sampled)")
    x, y = points("exam", "sampled")
    axes.plot(x, y, color=HELDOUT, lw=2.5, marker="o", ms=5, label="held-out tasks (sampled)")
    axes.scatter(*points("exam", "greedy"), color=INK, marker="D", s=28, zorder=3, label="held-out tasks (greedy)")
    for index, offset in ((0, (8, -14)), (-1, (-14, -18))):
        axes.annotate(f"{y[index]:.2f}", (x[index], y[index]), textcoords="offset points", xytext=offset, color=HELDOUT, weight="bold")
    axes.set(xlabel="step", ylabel="reward", title=title)
    if all(0 <= row["reward/mean"] <= 1 for row in rows):
        axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#e4e7eb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
