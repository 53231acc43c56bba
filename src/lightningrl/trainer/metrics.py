"""What do the metrics of several forests say about all of them? Sums stay sums, maxima maxima, and means count every term once."""

from collections.abc import Sequence

TERMS = "tokens/terms"


def merged(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of `forward_backward` over the micro-batches of one optimizer step; {} for none."""
    terms = [row[TERMS] for row in rows]
    return {name: _merge(name, [row[name] for row in rows], terms) for name in (rows[0] if rows else {})}


def _merge(name: str, values: list[float], terms: list[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name == "loss/value" or name.startswith("tokens/"):
        return sum(values)
    return sum(v * n for v, n in zip(values, terms, strict=True)) / max(sum(terms), 1.0)
