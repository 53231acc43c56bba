"""Who runs what, since when, what waits, and what has failed? From the records alone, for workers on any machine.

The columns of `table` know one attempt of each rollout. Attempts before it are read for rollouts that have several.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np

from lightningrl.look.columns import ENDS, STATUSES, Columns, Rows
from lightningrl.store import Records
from lightningrl.types import Attempt, Rollout, RolloutStatus

QUEUE = 50
"""Rollouts of the queue that are listed, those that are next first."""
FAILURES = 20
"""Failed attempts that are listed, the latest first."""
CHUNK = 500
"""Rollouts whose attempts are read at once."""
RUNNING = ENDS.index("running")
FAILED = [ENDS.index(status) for status in ("failed", "timeout", "lost")]

TRY = np.dtype([("rollout", "i4"), ("worker", "i4"), ("ended", "i1"), ("ended_at", "f8"), ("error", "i4")])
"""One attempt. `rollout`: index in the columns. The other fields are as there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An attempt that runs."""

    rollout: str
    attempt: int
    """Its number, from 1."""
    since: float
    """Unix seconds."""
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt that has failed, timed out, or was lost."""

    rollout: str
    worker: str
    at: float
    """Unix seconds."""
    status: str
    """`failed`, `timeout` or `lost`."""
    error: str | None
    """First line; None: no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What one worker does and has done."""

    running: tuple[Running, ...]
    """Longest first."""
    ended: int
    """Number of attempts that have ended, failed ones included."""
    failed: int
    """Number of attempts that have failed, timed out, or were lost."""
    last_error: str | None
    """First line of the error of the latest of them; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All workers of a run, and what waits for them."""

    counts: Mapping[RolloutStatus, int]
    workers: Mapping[str, Worker]
    queue: tuple[Rollout, ...]
    """The first `QUEUE` rollouts that wait."""
    failures: tuple[Failure, ...]
    """The latest `FAILURES`."""

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "workers": [{"worker": name, **asdict(worker)} for name, worker in self.workers.items()],
            "queue": [{"id": r.id, "task": r.task.id, "labels": list(r.labels)} for r in self.queue],
            "queued": self.counts.get("queued", 0),
            "failures": [asdict(failure) for failure in self.failures],
        }


@final
class Queue:
    """The workload of one run that is open for reading, which `columns` describe. All viewers share it."""

    def __init__(self, records: Records, columns: Columns) -> None:
        self._records = records
        self._columns = columns
        self._known: dict[int, int] = {}
        """Rollout → number of its attempts, where the earlier ones have been read."""
        self._earlier = np.zeros(0, TRY)

    async def look(self) -> Workload:
        """The workload, as far as the columns know it."""
        await self._read_earlier()
        columns, rows = self._columns, self._columns.rows
        waiting = np.flatnonzero(rows["status"] == STATUSES.index("queued"))
        first = waiting[np.argsort(rows["place"][waiting])][:QUEUE]
        counts = np.bincount(rows["status"], minlength=len(STATUSES)).tolist()
        tries = np.concatenate((_latest(rows), self._earlier))
        tries = tries[np.argsort(tries["ended_at"], kind="stable")]
        failed = tries[np.isin(tries["ended"], FAILED)]
        return Workload(
            counts={status: count for status, count in zip(STATUSES, counts, strict=True) if count},
            workers=_workers(columns, tries, failed),
            queue=tuple(await self._records.rollouts(ids=[columns.ids[index] for index in first])),
            failures=tuple(_failure(columns, one) for one in failed[: -FAILURES - 1 : -1].tolist()),
        )

    async def _read_earlier(self) -> None:
        """Read the attempts that the columns no longer have, since later ones have begun."""
        columns, attempts = self._columns, self._columns.rows["attempts"]
        several = np.flatnonzero(attempts > 1).tolist()
        new = [index for index in several if self._known.get(index) != attempts[index]]
        for start in range(0, len(new), CHUNK):
            chunk = {columns.ids[index]: index for index in new[start : start + CHUNK]}
            read = await self._records.attempts(list(chunk))
            later = [attempt.number < attempts[chunk[attempt.rollout_id]] for attempt in read]
            tries = [_try(columns, chunk[one.rollout_id], one) for one, known in zip(read, later, strict=True) if known]
            kept = self._earlier[~np.isin(self._earlier["rollout"], list(chunk.values()))]
            self._earlier = np.concatenate((kept, np.array(tries, TRY)))
            self._known.update((index, int(attempts[index])) for index in chunk.values())


def _latest(rows: Rows) -> Rows:
    """The attempts that the columns have, as `TRY`."""
    begun = np.flatnonzero(rows["attempts"] > 0)
    tries = np.zeros(len(begun), TRY)
    tries["rollout"] = begun
    for name in ("worker", "ended", "ended_at", "error"):
        tries[name] = rows[name][begun]
    return tries


def _try(columns: Columns, rollout: int, attempt: Attempt) -> tuple[int, int, int, float, int]:
    error = -1 if not attempt.error else columns.errors.number(attempt.error.splitlines()[0])
    ended_at = math.nan if attempt.ended_at is None else attempt.ended_at
    return rollout, columns.workers.number(attempt.worker), ENDS.index(attempt.status), ended_at, error


def _workers(columns: Columns, tries: Rows, failed: Rows) -> dict[str, Worker]:
    """Name → worker; those that run something come first. `tries` and `failed` are in order of their ends."""
    names = columns.workers.texts
    ended = np.bincount(tries["worker"][tries["ended"] != RUNNING], minlength=len(names))
    failures = np.bincount(failed["worker"], minlength=len(names))
    last = dict(zip(failed["worker"].tolist(), failed["error"].tolist(), strict=True))
    running: dict[int, list[Running]] = {}
    rows = columns.rows
    runs = np.flatnonzero(rows["ended"] == RUNNING)
    for index in runs[np.argsort(rows["began_at"][runs])].tolist():
        running.setdefault(int(rows["worker"][index]), []).append(_running(columns, index))
    found = {
        names[number]: Worker(
            running=tuple(running.get(number, ())),
            ended=int(ended[number]),
            failed=int(failures[number]),
            last_error=_text(columns, last.get(number, -1)),
        )
        for number in np.unique(tries["worker"]).tolist()
    }
    return dict(sorted(found.items(), key=lambda item: (not item[1].running, item[0])))


def _running(columns: Columns, index: int) -> Running:
    row = columns.rows[index]
    return Running(
        rollout=columns.ids[index],
        attempt=int(row["attempts"]),
        since=float(row["began_at"]),
        task=columns.tasks.texts[row["task"]],
    )


def _failure(columns: Columns, one: tuple[int, int, int, float, int]) -> Failure:
    rollout, worker, ended, at, error = one
    return Failure(
        rollout=columns.ids[rollout],
        worker=columns.workers.texts[worker],
        at=at,
        status=str(ENDS[ended]),
        error=_text(columns, error),
    )


def _text(columns: Columns, error: int) -> str | None:
    return None if error < 0 else columns.errors.texts[error]
