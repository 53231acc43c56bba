"""All rollouts of a run, kept up to date while it goes on.

store → `Outcome`s, page by page → `Columns` → `select` → a page of the table. The latest rollouts are read first, so a
first answer comes at once; the rest follows in the background, 2,000 rollouts at a time (20 ms: benchmarks/ui.py).
"""

import asyncio
from typing import Any, final

import numpy as np

from lightningrl.data.intervals import clustered_mean
from lightningrl.look.columns import KINDS, Columns, Rows
from lightningrl.look.search import Search
from lightningrl.look.selection import Query, matching, select
from lightningrl.store import Records, Where

PAGE = 2000
"""Rollouts that are read at once. Others who read the same store wait for one page at most."""

PATIENCE_S = 0.1
"""Seconds that a viewer waits for news before the table answers with what it has."""


@final
class Table:
    """The table of one run that is open for reading. All viewers share it."""

    def __init__(self, records: Records) -> None:
        self.columns = Columns()
        self._records = records
        self._search = Search(records, self.columns)
        self._cursor: int | None = None
        """Up to which change the table knows all; None: nothing was read yet."""
        self._earlier = 0
        """Changes up to this one are not read yet."""
        self._reading: asyncio.Task[None] | None = None
        self._intervals: tuple[int, dict[int, tuple[float, float]]] = (-1, {})
        """Those at a cursor."""

    @property
    def cursor(self) -> int:
        return self._cursor or 0

    @property
    def complete(self) -> bool:
        """Whether all rollouts have been read once."""
        return self._cursor is not None and self._earlier <= 0

    async def refresh(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Read what has changed. Returns after `timeout_s` at the latest, while the reading goes on."""
        reading = self._reading = self._reading or asyncio.create_task(self._read())
        await asyncio.wait([reading], timeout=timeout_s)
        if reading.done():
            if self._reading is reading:
                self._reading = None
            reading.result()

    async def as_json(self, query: Query) -> dict[str, Any]:
        """The rollouts that match, with how far the table has been read, and how far their calls have been searched."""
        tasks = set(await self._records.places(Where(text=query.task))) if query.task else None
        found = None
        if query.text:
            found = await self._search.look(query.text, among=matching(self.columns, query, tasks=tasks))
        selection = select(self.columns, query, tasks=tasks, said=None if found is None else found.said)
        return {
            **selection.as_json(),
            "cursor": self.cursor,
            "complete": self.complete,
            "searched": None if found is None else {"done": found.done, "of": found.of},
        }

    def intervals(self) -> dict[int, tuple[float, float]]:
        """Step from 1 → 95 % interval of the mean final reward of the rollouts that it learnt from. Empty until the
        table is complete.
        """
        if self.complete and self._intervals[0] != self.cursor:
            self._intervals = self.cursor, reward_intervals(self.columns)
        return self._intervals[1]

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        if self._cursor is None:
            self._cursor = self._earlier = (await self._records.changes()).cursor
        while self._earlier > 0:
            page = await self._records.outcomes(before=self._earlier, limit=PAGE)
            self.columns.put(page.rows)
            self._earlier = page.cursor
        while True:
            page = await self._records.outcomes(after=self._cursor, limit=PAGE)
            self.columns.put(page.rows)
            if page.cursor == self._cursor:
                return
            self._cursor = page.cursor


def reward_intervals(columns: Columns) -> dict[int, tuple[float, float]]:
    """Step from 1 → 95 % interval of the mean final reward without branches, as `reward/mean`, clustered by group. Left
    out: steps with one group.
    """
    rows = columns.rows
    rows = rows[(rows["kind"] == KINDS.index("train")) & ~np.isnan(rows["reward"])]
    rows = rows[np.argsort(rows["step"], kind="stable")]
    steps, starts = np.unique(rows["step"], return_index=True)
    found: dict[int, tuple[float, float]] = {}
    for step, of_step in zip(steps.tolist(), np.split(rows, starts)[1:], strict=True):
        kept = of_step[~_replaced(of_step)]
        interval = clustered_mean(kept["reward"], kept["group"])
        if interval is not None:
            found[step] = interval
    return found


def _replaced(rows: Rows) -> np.ndarray:
    """[R] whether dynamic sampling has replaced the rollout's group, since all rewards in it are equal."""
    _, places = np.unique(rows["group"], return_inverse=True)
    lowest, highest = np.full(len(rows), np.inf), np.full(len(rows), -np.inf)
    np.minimum.at(lowest, places, rows["reward"])
    np.maximum.at(highest, places, rows["reward"])
    return (lowest == highest)[places] & (rows["retry"] < rows["retry"].max(initial=0))
