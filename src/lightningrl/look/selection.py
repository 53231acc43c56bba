"""Which rollouts does a viewer want to see? Columns and a query → a page of rows, and counts over all that match.

Counts by status, the histogram of rewards and the list of errors each leave out their own filter: they say what a
viewer would get by choosing another value there.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightningrl.errors import UserError
from lightningrl.look.columns import KINDS, STATUSES, Columns, Mask, Rows
from lightningrl.types import Doubles, RolloutStatus

SORTS = ("queue", "step", "task", "reward", "calls", "tokens", "seconds", "began")
BINS = 20
ERRORS = 50
"""Errors that are listed, the most frequent first."""
LONGEST = 1000
"""Characters of a text to search for. Databases have limits."""
ROWS = 1000
"""Maximum number of rows of one page."""

Sort: TypeAlias = tuple[str, bool]
"""(one of `SORTS`, whether the largest comes first)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters for rollouts, and the page that is wanted. All given filters must hold."""

    step: int | None = None
    """Optimizer step, from 1: its rollouts, and those of the held-out evaluation after it."""
    kind: str | None = None
    """One of `KINDS`."""
    split: str | None = None
    status: RolloutStatus | None = None
    reward: tuple[float, float] | None = None
    """Lowest and highest final reward, both inclusive."""
    group: str | None = None
    task: str = ""
    """Text in the task's id or in the JSON of its input."""
    error: str = ""
    """Text in the first line of the error."""
    text: str = ""
    """Text in what was said in its calls."""
    sort: Sort = ("queue", True)
    offset: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rollouts that match a query."""

    rows: tuple[dict[str, Any], ...]
    """One page, as JSON."""
    total: int
    counts: Mapping[RolloutStatus, int]
    edges: tuple[float, ...]
    """[bins + 1] of the histogram of rewards."""
    histogram: tuple[int, ...]
    """[bins] number of rollouts."""
    errors: tuple[tuple[str, int, str], ...]
    """(first line, number of rollouts, id of the latest of them)"""
    steps: tuple[int, int] | None
    """First and last step of the whole run; None: it has none."""
    kinds: tuple[str, ...]
    """All kinds of rollouts in the run."""
    splits: tuple[str, ...]
    """All splits of the run."""
    offset: int

    def as_json(self) -> dict[str, Any]:
        names = ("error", "count", "example")
        return {
            "total": self.total,
            "offset": self.offset,
            "counts": dict(self.counts),
            "histogram": {"edges": list(self.edges), "counts": list(self.histogram)},
            "errors": [dict(zip(names, error, strict=True)) for error in self.errors],
            "steps": None if self.steps is None else list(self.steps),
            "kinds": list(self.kinds),
            "splits": list(self.splits),
            "rows": list(self.rows),
        }


def query_of(parameters: Mapping[str, str]) -> Query:
    """The query of an address. Raises `UserError` for a value that it cannot read."""
    status, reward = parameters.get("status"), parameters.get("reward")
    if status is not None and status not in STATUSES:
        raise UserError(f"`{status}` is not a status", hint="one of: " + ", ".join(STATUSES))
    kind = parameters.get("kind")
    if kind is not None and kind not in KINDS:
        raise UserError(f"`{kind}` is not a kind of rollout", hint="one of: " + ", ".join(KINDS))
    sort = parameters.get("sort", "-queue")
    if sort.removeprefix("-") not in SORTS:
        hint = "one of: " + ", ".join(SORTS) + "; `-` in front for the largest first"
        raise UserError(f"cannot sort by `{sort}`", hint=hint)
    return Query(
        step=_whole(parameters, "step", 0) if "step" in parameters else None,
        kind=kind,
        split=parameters.get("split"),
        status=status,
        reward=None if reward is None else reward_range(reward),
        group=parameters.get("group"),
        task=_text(parameters, "task"),
        error=_text(parameters, "error"),
        text=_text(parameters, "text"),
        sort=(sort.removeprefix("-"), sort.startswith("-")),
        offset=_whole(parameters, "offset", 0),
        limit=min(ROWS, _whole(parameters, "limit", 100)),
    )


def reward_range(text: str) -> tuple[float, float]:
    """`0` is one value, and `0..0.5` is a range. Raises `UserError`."""
    low, dots, high = text.partition("..")
    try:
        return float(low or "-inf"), float((high or "inf") if dots else low)
    except ValueError:
        hint = "give one reward, e.g. `0`, or a range, e.g. `0..0.5`"
        raise UserError(f"reward `{text}` is not a number", hint=hint) from None


def _text(parameters: Mapping[str, str], name: str) -> str:
    text = parameters.get(name, "")
    if len(text) > LONGEST:
        raise UserError(f"{name} has `{len(text)}` characters", hint=f"search for up to {LONGEST:,}")
    return text


def _whole(parameters: Mapping[str, str], name: str, default: int) -> int:
    text = parameters.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name} `{text}` is not a whole number", hint=f"e.g. `{name}=3`")
    return int(text)


def select(
    columns: Columns,
    query: Query,
    *,
    tasks: Collection[int] | None = None,
    said: Mapping[int, str] | None = None,
) -> Selection:
    """`tasks`: places of the rollouts whose task has `query.task`; `said`: place → text around `query.text`. None: not
    asked for.
    """
    rows = columns.rows
    masks = _masks(columns, query, tasks=tasks, said=said)
    chosen = np.flatnonzero(_all_but(masks, ""))
    ordered = chosen[_order(columns, rows[chosen], query.sort)]
    page = ordered[query.offset : query.offset + query.limit]
    statuses = np.bincount(rows["status"][_all_but(masks, "status")], minlength=len(STATUSES))
    rewards = rows["reward"][_all_but(masks, "reward")]
    edges, histogram = _histogram(rewards[~np.isnan(rewards)])
    steps = rows["step"][rows["step"] >= 0]
    return Selection(
        rows=tuple(_row(columns, index, said=said) for index in page),
        total=len(chosen),
        counts={status: int(count) for status, count in zip(STATUSES, statuses, strict=True) if count},
        edges=edges,
        histogram=histogram,
        errors=_errors(columns, _all_but(masks, "error")),
        steps=(int(steps.min()), int(steps.max())) if len(steps) else None,
        kinds=tuple(KINDS[kind] for kind in np.unique(rows["kind"]).tolist()),
        splits=tuple(sorted(columns.splits.texts, key=lambda split: (split != "train", split))),
        offset=query.offset,
    )


def matching(columns: Columns, query: Query, *, tasks: Collection[int] | None = None) -> npt.NDArray[np.intp]:
    """Indices of the rollouts that pass all filters but `query.text`, the latest first."""
    chosen = np.flatnonzero(_all_but(_masks(columns, query, tasks=tasks, said=None), ""))
    return chosen[np.argsort(-columns.rows["place"][chosen])]


def _masks(
    columns: Columns, query: Query, *, tasks: Collection[int] | None, said: Mapping[int, str] | None
) -> dict[str, Mask]:
    """Filter → [R] whether the rollout passes it. "" passes all."""
    rows = columns.rows
    masks: dict[str, Mask] = {"": np.ones(len(rows), np.bool_)}
    if query.step is not None:
        masks["step"] = rows["step"] == query.step
    if query.kind is not None:
        masks["kind"] = rows["kind"] == KINDS.index(query.kind)
    if query.split is not None:
        masks["split"] = rows["split"] == columns.splits.find(query.split)
    if query.group is not None:
        masks["group"] = rows["group"] == columns.groups.find(query.group)
    if query.status is not None:
        masks["status"] = rows["status"] == STATUSES.index(query.status)
    if query.reward is not None:
        low, high = query.reward
        masks["reward"] = (rows["reward"] >= low) & (rows["reward"] <= high)
    if query.error:
        text = query.error.casefold()
        masks["error"] = columns.errors.matching(rows["error"], lambda error: text in error.casefold())
    for name, places in (("task", tasks), ("text", said)):
        if places is not None:
            masks[name] = np.isin(rows["place"], list(places))
    return masks


def _all_but(masks: Mapping[str, Mask], left_out: str) -> Mask:
    return np.logical_and.reduce([mask for name, mask in masks.items() if name != left_out or not name])


def _order(columns: Columns, rows: Rows, sort: Sort) -> npt.NDArray[np.intp]:
    """[R] indices in order: numbers that are not known come last, and equal ones with the latest rollout first."""
    name, descending = sort
    keys: Mapping[str, Callable[[], Doubles]] = {
        "queue": lambda: rows["place"].astype(float),
        "step": lambda: rows["step"].astype(float),
        "task": lambda: _ranks(columns.tasks.texts)[rows["task"]],
        "reward": lambda: rows["reward"],
        "calls": lambda: rows["calls"].astype(float),
        "tokens": lambda: rows["tokens"].astype(float),
        "seconds": lambda: rows["ended_at"] - rows["began_at"],
        "began": lambda: rows["began_at"],
    }
    key = keys[name]()
    return np.lexsort((-rows["place"], -key if descending else key))


def _ranks(texts: list[str]) -> Doubles:
    """[words] the place of each word in alphabetical order."""
    ranks = np.empty(len(texts))
    ranks[sorted(range(len(texts)), key=texts.__getitem__)] = np.arange(len(texts))
    return ranks


def _histogram(rewards: Doubles) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """(edges, counts). From 0 to 1 if all rewards are, so that pages of one run compare."""
    if not len(rewards):
        return (), ()
    low, high = float(rewards.min()), float(rewards.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    edges = np.round(np.linspace(low, high if high > low else low + 1, BINS + 1), 12)
    edges[0], edges[-1] = low, max(edges[-1], high)
    counts, _ = np.histogram(rewards, edges)
    return tuple(edges.tolist()), tuple(counts.tolist())


def _errors(columns: Columns, mask: Mask) -> tuple[tuple[str, int, str], ...]:
    rows = columns.rows
    failed = np.flatnonzero(mask & (rows["error"] >= 0))
    failed = failed[np.argsort(-rows["place"][failed])]
    numbers, first, counts = np.unique(rows["error"][failed], return_index=True, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:ERRORS]
    return tuple(
        (columns.errors.texts[numbers[n]], int(counts[n]), columns.ids[failed[first[n]]]) for n in frequent.tolist()
    )


def _row(columns: Columns, index: int, *, said: Mapping[int, str] | None) -> dict[str, Any]:
    row = dict(zip(columns.rows.dtype.names or (), columns.rows[index].tolist(), strict=True))
    seconds = row["ended_at"] - row["began_at"]
    return {
        "id": columns.ids[index],
        "group": columns.groups.texts[row["group"]],
        "kind": KINDS[row["kind"]],
        "step": row["step"] if row["step"] >= 0 else None,
        "split": columns.splits.texts[row["split"]],
        "task": columns.tasks.texts[row["task"]],
        "status": STATUSES[row["status"]],
        "attempts": row["attempts"],
        "reward": _known(row["reward"]),
        "calls": row["calls"],
        "tokens": row["tokens"],
        "seconds": _known(round(seconds, 3)),
        "began_at": _known(row["began_at"]),
        "error": None if row["error"] < 0 else columns.errors.texts[row["error"]],
        "said": None if said is None else said.get(row["place"]),
    }


def _known(number: float) -> float | None:
    return None if number != number else number  # NaN
