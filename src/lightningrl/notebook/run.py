"""A run to read from Python, while it goes on or afterwards: its curve, health and rollouts. Nothing here writes."""

import asyncio
import sys
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lightningrl.errors import UserError
from lightningrl.look.checkup import checkup_of
from lightningrl.look.journal import MetricsFile
from lightningrl.look.opened import Opened, opened
from lightningrl.look.redaction import redacted
from lightningrl.look.rollout import look_at
from lightningrl.look.runs import State, is_run, result_of, state_of
from lightningrl.look.selection import SORTS, Query
from lightningrl.look.table import Table
from lightningrl.notebook.curve import Point, curve_of, overview, points_of
from lightningrl.notebook.health import Health
from lightningrl.notebook.html import frame
from lightningrl.notebook.rollout import ShownRollout, shown
from lightningrl.notebook.rows import Rows
from lightningrl.recipe import load_config
from lightningrl.types import RolloutStatus

T = TypeVar("T")

READ_S = 600.0
"""Timeout to read all rollouts; 100,000 take a second (benchmarks/ui.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One rollout of a list. `Run.rollout(id)` has its calls."""

    id: str
    group: str
    """Rollouts of the same task and step are one group."""
    kind: str
    """`train`, `exam`, `branch` (of a training rollout), or `run` for another."""
    step: int | None
    """Training step, from 1; of an exam the number of steps before it. None: neither."""
    split: str
    task: str
    """Id of the task."""
    status: RolloutStatus
    attempts: int
    reward: float | None
    """Final reward; None: it has none (yet)."""
    calls: int
    tokens: int
    """Sampled tokens."""
    seconds: float | None
    """None: its attempt has not ended."""
    began_at: float | None
    """Unix seconds; None: it has not begun."""
    error: str | None
    """First line of the error; None: no error."""
    said: str | None
    """What was said around the text that was searched for; None: nothing was searched for."""

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder. Every method reads what is there now, so a run that goes on can be watched."""

    path: Path

    @property
    def state(self) -> State:
        """`running`, `complete` or `stopped`."""
        return state_of(self.path)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the run, e.g. `run.settings["loop"]["group_size"]`. Secrets are replaced by `•••`."""
        return redacted(load_config(self.path / "config.toml"))

    @property
    def result(self) -> Mapping[str, Any] | None:
        """The result of a complete run, as `lightningrl train --json` prints it; None before the end."""
        return result_of(self.path)

    def curve(self) -> Rows[Point]:
        """All training steps and exams so far, in order, with 95 % intervals where they are known."""

        async def read() -> Mapping[int, tuple[float, float]]:
            async with opened(self.path) as run:
                return (await _table(run)).intervals()

        points = self._points(_done(read()))
        return curve_of(points, steps=self._steps(points))

    def health(self) -> Health:
        """The report of `lightningrl health`: signals at the beginning and now, warnings and notes."""
        return Health(checkup_of(self.path))

    def rollouts(
        self,
        *,
        reward: float | tuple[float, float] | None = None,
        failed: bool = False,
        step: int | None = None,
        split: str | None = None,
        group: str | None = None,
        task: str = "",
        error: str = "",
        said: str = "",
        sort: str = "-queue",
        limit: int | None = 20,
    ) -> Rows[RolloutRow]:
        """The rollouts that pass all filters, the latest first.

        Args:
            reward: the final reward, or the lowest and the highest
            failed: only those without an accepted attempt
            step: a training step, from 1; also the exam after it
            split: `train` or `heldout`
            group: id of a group
            task: text in the task's id or input
            error: text in the first line of the error
            said: text in the messages and answers of its calls
            sort: `queue`, `step`, `task`, `reward`, `calls`, `tokens`, `seconds` or `began`; `-` in front: descending
            limit: number of rollouts; None: all
        """
        if sort.removeprefix("-") not in SORTS:
            raise UserError(f"cannot sort by `{sort}`", hint="one of: " + ", ".join(SORTS))
        query = Query(
            step=step,
            split=split,
            status="failed" if failed else None,
            reward=(reward, reward) if isinstance(reward, int | float) else reward,
            group=group,
            task=task,
            error=error,
            text=said,
            sort=(sort.removeprefix("-"), sort.startswith("-")),
            limit=sys.maxsize if limit is None else limit,
        )

        async def read() -> list[RolloutRow]:
            async with opened(self.path) as run:
                rows = await _select(await _table(run), query)
            names = [field.name for field in fields(RolloutRow)]
            return [RolloutRow(**{name: row[name] for name in names}) for row in rows]

        return Rows(_done(read()), plain=RolloutRow.plain, shown=SHOWN, empty="no rollout passes the filters")

    def rollout(self, rollout_id: str | None = None, *, attempt: int | None = None) -> ShownRollout:
        """One rollout with its calls. The beginning of an id is enough if it is unique. Without an id, it is the latest
        rollout with a reward below the mean of its group. `attempt`: its number, to see another than the accepted one.
        Raises `UserError` if there is none.
        """

        async def read() -> ShownRollout:
            async with opened(self.path) as run:
                return shown(await look_at(run, rollout_id, attempt=attempt))

        return _done(read())

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        points = self._points({})
        return str(frame(overview(self.path, points, steps=self._steps(points), result=self.result)))

    def _points(self, intervals: Mapping[int, tuple[float, float]]) -> tuple[Point, ...]:
        return points_of(MetricsFile(self.path / "metrics.jsonl").rows(), intervals=intervals)

    def _steps(self, points: tuple[Point, ...]) -> int:
        """Steps of the whole run; 0 of one that does not train, as by `lightningrl run`."""
        config = self.path / "config.toml"
        return load_config(config).loop.steps if config.exists() else len(points)


SHOWN = ("id", "step", "task", "status", "reward", "calls", "tokens", "seconds", "error", "said")
"""Columns of a table of rollouts."""


def open_run(path: str | Path) -> Run:
    """Open a run's folder for reading, finished or not: `lightningrl.open("runs/my-run")`.

    Raises `UserError` if the folder has neither settings nor records.
    """
    if not is_run(Path(path)):
        raise UserError(f"`{path}` holds no run", hint="give the folder that `lightningrl train` printed")
    return Run(Path(path))


async def _table(run: Opened) -> Table:
    """The table of all rollouts, read to its end."""
    table = Table(run.records)
    await table.refresh(timeout_s=READ_S)
    return table


async def _select(table: Table, query: Query) -> list[dict[str, Any]]:
    """The rows that match. A search in what was said goes on until all calls have been searched."""
    while True:
        found = await table.as_json(query)
        searched = found["searched"]
        if searched is None or searched["done"] >= searched["of"]:
            return found["rows"]


def _done(reading: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. It runs in a thread of its own, since a notebook's thread has a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, reading).result()
