"""Which rows and rollouts of a run has a logger not seen yet? Its notes remember how far it has come."""

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightningrl.loggers.base import Ended, Row
from lightningrl.loggers.notes import Notes
from lightningrl.store import Records, open_records
from lightningrl.store.base import ENDED
from lightningrl.store.place import records_at
from lightningrl.types import Rollout, by_attempt

BATCH = 16
"""Number of rollouts that are read together, to limit memory."""


class Rows:
    """The rows of `metrics.jsonl`, each once. A resumed run writes some of them again."""

    def __init__(self, path: Path, notes: Notes) -> None:
        self._path, self._notes = path, notes
        self._inode = self._read = 0
        """Number of the file, and how many of its bytes were read."""
        self._logged: dict[str, int] = dict(notes.read("rows", {}))
        """Kind of row → the latest step that was logged."""
        self._waiting = deque[tuple[str, Row]]()

    def new(self) -> Iterator[Row]:
        """Rows that were not logged yet. The caller says `done` before it takes the next one; a row that is not `done`
        comes again.
        """
        self._waiting.extend(self._added())
        while self._waiting:
            kind, row = self._waiting[0]
            if row.step > self._logged.get(kind, -1):
                yield row
            else:
                self._waiting.popleft()

    def done(self, row: Row) -> None:
        """The logger has this row."""
        kind, first = self._waiting.popleft()
        assert first is row
        self._logged[kind] = row.step
        self._notes.write({"rows": self._logged})

    def _added(self) -> Iterator[tuple[str, Row]]:
        """Complete lines that were added to the file. At each start of a run, the file is written anew."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if (number := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._read = number, 0
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if found := row_of(json.loads(line)):
                    yield found


def row_of(row: Mapping[str, Any]) -> tuple[str, Row] | None:
    """(kind, row) of a line of `metrics.jsonl`; None for a line without metrics."""
    metrics = {name: value for name, value in row.items() if "/" in name and isinstance(value, int | float)}
    at = float(row.get("at", time.time()))
    match row["kind"]:
        case "step":
            return "step", Row(step=row["step"] + 1, at=at, metrics=metrics)
        case "exam":
            named = {f"heldout/{row['mode']}/{name}": value for name, value in metrics.items()}
            return row["mode"], Row(step=row["step"], at=at, metrics=named)
        case _:
            return None


class Rollouts:
    """Rollouts that have ended, in the order in which they ended, each attempt once.

    The store tells what changed since a cursor. Of the rollouts since the cursor, the notes name those that are done:
    the cursor moves when all of them are. A failed rollout may be repeated, so its number of attempts is kept, too.
    """

    def __init__(self, folder: Path, notes: Notes) -> None:
        self._folder, self._notes = folder, notes
        self._records: Records | None = None
        self._cursor: int = notes.read("cursor", 0)
        self._next = self._cursor
        self._done: list[str] = list(notes.read("done", []))
        self._failed: dict[str, int] = dict(notes.read("failed", {}))
        self._waiting = deque[Rollout]()

    async def look(self) -> bool:
        """Find what has changed, if all before is done. Returns whether there may be more changes."""
        if self._waiting:
            return True
        if self._records is None:
            if (found := records_at(self._folder)) is None:
                return False
            self._records = await open_records(found[1])
        changes = await self._records.changes(self._cursor)
        self._next = changes.cursor
        done = set(self._done)
        self._waiting.extend(r for r in changes.rollouts if r.status in ENDED and r.id not in done)
        self._move()
        return bool(changes.rollouts)

    async def batch(self) -> list[Ended]:
        """The next few rollouts; empty: all that were found are done. Those that are not `done` come again."""
        rollouts = [self._waiting[place] for place in range(min(BATCH, len(self._waiting)))]
        if self._records is None or not rollouts:
            return []
        attempts = await self._records.attempts([rollout.id for rollout in rollouts])
        new = [attempt for attempt in attempts if attempt.number > self._failed.get(attempt.rollout_id, 0)]
        ids = [attempt.id for attempt in new]
        calls, spans = by_attempt(await self._records.calls(ids)), by_attempt(await self._records.spans(ids))
        rewards = by_attempt(await self._records.rewards(ids))
        found = list[Ended]()
        for rollout in rollouts:
            own = tuple(attempt for attempt in new if attempt.rollout_id == rollout.id)
            found.append(
                Ended(
                    rollout=rollout,
                    attempts=own,
                    calls=tuple(call for attempt in own for call in calls.get(attempt.id, ())),
                    spans=tuple(span for attempt in own for span in spans.get(attempt.id, ())),
                    rewards=tuple(reward for attempt in own for reward in rewards.get(attempt.id, ())),
                )
            )
        return found

    def done(self, batch: Sequence[Ended]) -> None:
        """The logger has these rollouts."""
        for ended in batch:
            rollout = self._waiting.popleft()
            assert rollout is ended.rollout
            self._done.append(rollout.id)
            if rollout.status == "failed" and ended.attempts:
                self._failed[rollout.id] = ended.attempts[-1].number
        self._move()
        self._notes.write({"cursor": self._cursor, "done": self._done, "failed": self._failed})

    async def close(self) -> None:
        if self._records is not None:
            await self._records.close()

    def _move(self) -> None:
        if not self._waiting:
            self._cursor, self._done = self._next, []
