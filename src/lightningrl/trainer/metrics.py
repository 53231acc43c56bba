"""Merge metrics of several forests, or of several optimizer steps, into one row."""

from collections.abc import Sequence

import numpy as np

TERMS, CALLS = "tokens/terms", "critic/calls"


def merged(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of one optimizer step from those of its micro-batches: sums, maxima, and means over sampled tokens
    (or calls). {} for no rows.
    """
    row = {name: _merge(name, rows) for name in (rows[0] if rows else {})}
    return row | ({"critic/explained_variance": explained_variance(row)} if CALLS in row else {})


def explained_variance(row: dict[str, float]) -> float:
    """1 - Var(V - R) / Var(R) of values V and returns R: 1 for a perfect critic; 0 if V or R is constant."""
    residual = row["critic/loss"] - row["critic/bias"] ** 2
    variance = row["critic/return_square"] - row["critic/return_mean"] ** 2
    return 1.0 - residual / variance if variance > 1e-12 else 0.0


def _merge(name: str, rows: Sequence[dict[str, float]]) -> float:
    values = [row[name] for row in rows]
    if name.endswith("_max"):
        return max(values)
    if name in ("loss/value", CALLS) or name.startswith("tokens/"):
        return sum(values)
    counts = [row[CALLS if name.startswith("critic/") else TERMS] for row in rows]
    return sum(v * n for v, n in zip(values, counts, strict=True)) / max(sum(counts), 1.0)


def over_minibatches(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of the optimizer steps over one batch, as one row: token counts are sums, `_max` maxima,
    `optim/steps` the last value, and the rest means. A step that was skipped may lack some.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _over_steps(name, [row[name] for row in rows if name in row]) for name in names}


def _over_steps(name: str, values: list[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name.startswith("tokens/"):
        return sum(values)
    return values[-1] if name == "optim/steps" else float(np.mean(values))
