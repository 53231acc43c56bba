"""The default store: one SQLite file. Write-ahead log, `synchronous=FULL`, one writer thread whose commits are shared by all who wait.

Other processes may read, and write, the same file meanwhile; `wait` wakes for what this store object has written itself.
"""

import asyncio
import math
import secrets
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightningrl.errors import StoreError, UserError
from lightningrl.store import rows
from lightningrl.store.schema import migrate
from lightningrl.store.thread import DatabaseThread
from lightningrl.types import Attempt, AttemptStatus, Call, Ints, Reward, Rollout, Weights

FORGIVEN = 10
"""Lost attempts of one rollout that do not count against `max_attempts`: a dying machine is not the agent's fault, for ever it would be."""

ENDED: tuple[AttemptStatus, ...] = ("succeeded", "failed", "timeout", "lost")

CHUNK = 500
"""Ids in one `IN (…)`; older SQLite builds allow 999 variables."""


class SQLiteStore:
    """See `Store`. Open it with `await SQLiteStore.open(path)`; `:memory:` lives as long as the object."""

    def __init__(self, writer: sqlite3.Connection, reader: sqlite3.Connection | None, lock: sqlite3.Connection | None) -> None:
        self._waiters = _Waiters()
        self._prompts = _Prompts()
        self._lock = lock
        self._writer = DatabaseThread(writer, name="store-writer", transactions=True, events=self)
        self._reader = self._writer
        if reader is not None:
            self._reader = DatabaseThread(reader, name="store-reader", transactions=False, events=self)

    @classmethod
    async def open(cls, path: str | Path, *, exclusive: bool = False) -> "SQLiteStore":
        """Open or create the file. `exclusive` claims it for this process until `close`: a second such claim is a `UserError`,
        and attempts that an earlier, dead owner left running are lost at once, without waiting for their leases.
        """
        memory = str(path) == ":memory:"
        try:
            lock = _own(path) if exclusive and not memory else None
            writer = _connect(path)
            migrate(writer)
            reader = None if memory else _connect(path)
            if reader is not None:
                reader.execute("PRAGMA query_only = 1")
        except sqlite3.Error as error:
            raise UserError(
                f"cannot open the store `{path}`: {error}", hint="is it a SQLite file, in a folder that exists and is writable?"
            ) from error
        store = cls(writer, reader, lock)
        if exclusive:
            await store._writer.run(lambda connection: store._expire(connection, now=math.inf))
        return store

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()
        if self._lock is not None:
            self._lock.close()

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        inputs = [rows.input_row(rollout.task) for rollout in rollouts]
        new = [rows.rollout_row(rollout, digest=digest) for rollout, (digest, _) in zip(rollouts, inputs, strict=True)]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT INTO inputs (digest, input) VALUES (?, ?) ON CONFLICT DO NOTHING", inputs)
            connection.executemany(rows.ENQUEUE, new)

        await self._writer.run(work)

    async def claim(self, worker: str, *, limit: int, lease_s: float) -> list[tuple[Rollout, Attempt]]:
        def work(connection: sqlite3.Connection) -> list[tuple[Rollout, Attempt]]:
            now = time.time()
            self._expire(connection, now=now)
            queued = connection.execute(
                f"SELECT {rows.ROLLOUT} FROM whole_rollouts WHERE status = 'queued' ORDER BY seq LIMIT ?", (limit,)
            ).fetchall()
            return [_begin(connection, row[0], worker=worker, now=now, lease_until=now + lease_s) for row in queued]

        return await self._writer.run(work)

    async def heartbeat(self, attempt_ids: Sequence[str], *, lease_s: float) -> None:
        until = time.time() + lease_s
        ids = [(until, attempt_id) for attempt_id in attempt_ids]
        await self._writer.run(lambda c: c.executemany("UPDATE attempts SET lease_until = ? WHERE id = ? AND status = 'running'", ids))

    async def finish(
        self,
        attempt_id: str,
        status: AttemptStatus,
        *,
        rewards: Sequence[Reward] = (),
        output: object = None,
        error: str | None = None,
    ) -> None:
        if status not in ENDED:
            raise StoreError(f"an attempt cannot end as `{status}`", hint="one of: " + ", ".join(ENDED))
        output_json = rows.to_json(output)

        def work(connection: sqlite3.Connection) -> None:
            if _status(connection, attempt_id) != "running":
                return  # the first word counts
            for reward in rewards:
                _add_reward(connection, reward, attempt_id=attempt_id)
            self._end(connection, attempt_id, status, output=output_json, error=error)

        await self._writer.run(work)

    async def append(self, *records: Call | Reward) -> None:
        def work(connection: sqlite3.Connection) -> None:
            for record in records:
                if _status(connection, record.attempt_id) != "running":
                    raise StoreError(f"attempt `{record.attempt_id}` has ended: it takes no more records")
                if isinstance(record, Call):
                    self._add_call(connection, record)
                else:
                    _add_reward(connection, record, attempt_id=record.attempt_id)

        await self._writer.run(work)

    async def attempt_by_token(self, token: str) -> tuple[Rollout, Attempt] | None:
        def work(connection: sqlite3.Connection) -> tuple[Rollout, Attempt] | None:
            row = connection.execute(f"SELECT {rows.ATTEMPT} FROM attempts WHERE token = ?", (token,)).fetchone()
            if row is None:
                return None
            rollout = connection.execute(f"SELECT {rows.ROLLOUT} FROM whole_rollouts WHERE id = ?", (row[1],)).fetchone()
            return rows.rollout_of(rollout), rows.attempt_of(row)

        return await self._reader.run(work)

    async def rollouts(self, *, ids: Sequence[str] | None = None, group_ids: Sequence[str] | None = None) -> list[Rollout]:
        def work(connection: sqlite3.Connection) -> list[Rollout]:
            if ids is None and group_ids is None:
                found = connection.execute(f"SELECT seq, {rows.ROLLOUT} FROM whole_rollouts").fetchall()
            else:
                found = _select(connection, f"SELECT seq, {rows.ROLLOUT} FROM whole_rollouts WHERE id", ids or ())
                found += _select(connection, f"SELECT seq, {rows.ROLLOUT} FROM whole_rollouts WHERE group_id", group_ids or ())
            return [rows.rollout_of(row[1:]) for row in sorted(set(found))]

        return await self._reader.run(work)

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        def work(connection: sqlite3.Connection) -> list[Attempt]:
            found = _select(connection, f"SELECT {rows.ATTEMPT} FROM attempts WHERE rollout_id", rollout_ids)
            order = {rollout_id: place for place, rollout_id in enumerate(rollout_ids)}
            return [rows.attempt_of(row) for row in sorted(found, key=lambda row: (order[row[1]], row[2]))]

        return await self._reader.run(work)

    async def calls(self, attempt_ids: Sequence[str]) -> list[Call]:
        return await self._reader.run(lambda c: [call for attempt_id in attempt_ids for call in rows.read_calls(c, attempt_id)])

    async def rewards(self, attempt_ids: Sequence[str]) -> list[Reward]:
        def work(connection: sqlite3.Connection) -> list[Reward]:
            statement = f"SELECT {rows.REWARD} FROM rewards WHERE attempt_id = ? ORDER BY seq"
            return [rows.reward_of(row) for attempt_id in attempt_ids for row in connection.execute(statement, (attempt_id,))]

        return await self._reader.run(work)

    async def wait(self, rollout_ids: Sequence[str], *, timeout_s: float) -> list[Rollout]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._waiters.register(rollout_ids) as waiter:
                ended = [rollout for rollout in await self.rollouts(ids=rollout_ids) if rollout.status in ("succeeded", "failed")]
                waiter.forget(rollout.id for rollout in ended)
                if not waiter.pending or time.monotonic() >= deadline:
                    return ended
                await asyncio.wait([waiter.future], timeout=max(0.0, deadline - time.monotonic()))

    async def publish(self, weights: Weights) -> None:
        row = (weights.policy, weights.version, weights.uri, weights.kind)
        await self._writer.run(lambda c: c.execute("INSERT INTO weights VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING", row))

    async def weights(self, policy: str) -> Weights | None:
        def work(connection: sqlite3.Connection) -> Weights | None:
            statement = "SELECT policy, version, uri, kind FROM weights WHERE policy = ? ORDER BY version DESC LIMIT 1"
            row = connection.execute(statement, (policy,)).fetchone()
            return None if row is None else rows.weights_of(row)

        return await self._reader.run(work)

    def committed(self) -> None:
        """Called on the writer thread."""
        self._waiters.wake()

    def undone(self) -> None:
        """Called on the writer thread."""
        self._prompts.clear()

    def _expire(self, connection: sqlite3.Connection, *, now: float) -> None:
        passed = connection.execute("SELECT id FROM attempts WHERE status = 'running' AND lease_until <= ? ORDER BY seq", (now,)).fetchall()
        for (attempt_id,) in passed:
            self._end(connection, attempt_id, "lost", output="null", error="the lease passed: whoever ran this attempt is gone")

    def _end(self, connection: sqlite3.Connection, attempt_id: str, status: AttemptStatus, *, output: str, error: str | None) -> None:
        """Close a running attempt, and decide what becomes of its rollout."""
        change = "UPDATE attempts SET status = ?, output = ?, error = ?, ended_at = ? WHERE id = ?"
        connection.execute(change, (status, output, rows.clean(error), time.time(), attempt_id))
        (rollout_id,) = connection.execute("SELECT rollout_id FROM attempts WHERE id = ?", (attempt_id,)).fetchone()
        if status == "succeeded":
            done = "UPDATE rollouts SET status = 'succeeded', accepted_attempt_id = ? WHERE id = ?"
            connection.execute(done, (attempt_id, rollout_id))
        else:
            tally = "SELECT count(*), total(status = 'lost') FROM attempts WHERE rollout_id = ?"
            tries, lost = connection.execute(tally, (rollout_id,)).fetchone()
            (allowed,) = connection.execute("SELECT max_attempts FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            after = "queued" if tries - min(lost, FORGIVEN) < allowed else "failed"
            connection.execute("UPDATE rollouts SET status = ? WHERE id = ?", (after, rollout_id))
        self._waiters.note(rollout_id)

    def _add_call(self, connection: sqlite3.Connection, call: Call) -> None:
        base = _base(connection, call)
        shared = 0 if base is None else _shared(self._prompts.of(connection, base, attempt_id=call.attempt_id), call.prompt_ids)
        row = rows.call_row(call, base_call_id=base, shared=shared)
        connection.execute(f"INSERT INTO calls ({rows.CALL}) VALUES ({rows.slots(rows.CALL)})", row)
        self._prompts.keep(call.id, np.concatenate((call.prompt_ids, call.completion_ids)))


class _Prompts:
    """Prompt and completion of recent calls, so that the next one's delta costs no reading. Writer thread only."""

    LIMIT = 4_000_000
    """Ids kept: 16 MB."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, Ints] = OrderedDict()
        self._total = 0

    def of(self, connection: sqlite3.Connection, call_id: str, *, attempt_id: str) -> Ints:
        if call_id not in self._ids:
            for call in rows.read_calls(connection, attempt_id):
                self.keep(call.id, np.concatenate((call.prompt_ids, call.completion_ids)), trim=False)
        found = self._ids[call_id]
        self._trim()
        return found

    def keep(self, call_id: str, ids: Ints, *, trim: bool = True) -> None:
        self._total += len(ids) - len(self._ids.pop(call_id, ids[:0]))
        self._ids[call_id] = ids
        if trim:
            self._trim()

    def clear(self) -> None:
        """Forget all: one of them may have been rolled back."""
        self._ids.clear()
        self._total = 0

    def _trim(self) -> None:
        while self._total > self.LIMIT:
            self._total -= len(self._ids.popitem(last=False)[1])


@dataclass(eq=False)
class _Waiter:
    """One `wait` that is under way."""

    pending: set[str]
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    leave: Callable[["_Waiter"], None]

    def forget(self, rollout_ids: Iterable[str]) -> None:
        self.pending.difference_update(rollout_ids)

    def __enter__(self) -> "_Waiter":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(self)


class _Waiters:
    """Whom to wake when rollouts have changed. `note` and `wake` run on the writer thread, the rest on the event loops."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiters: set[_Waiter] = set()
        self._changed: list[str] = []

    def register(self, rollout_ids: Sequence[str]) -> _Waiter:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(set(rollout_ids), loop.create_future(), loop, self._leave)
        with self._mutex:
            self._waiters.add(waiter)
        return waiter

    def note(self, rollout_id: str) -> None:
        self._changed.append(rollout_id)

    def wake(self) -> None:
        """Called after each commit. A waiter looks again, so that a false alarm (requeued, rolled back) does no harm."""
        if not self._changed:
            return
        with self._mutex:
            for waiter in self._waiters:
                try:
                    waiter.loop.call_soon_threadsafe(_settle, waiter, tuple(self._changed))
                except RuntimeError:  # its event loop was closed: nobody waits any more
                    continue
        self._changed.clear()

    def _leave(self, waiter: _Waiter) -> None:
        with self._mutex:
            self._waiters.discard(waiter)


def _settle(waiter: _Waiter, changed: tuple[str, ...]) -> None:
    waiter.forget(changed)
    if not waiter.pending and not waiter.future.done():
        waiter.future.set_result(None)


def _connect(path: str | Path) -> sqlite3.Connection:
    connection = sqlite3.connect(str(path), timeout=30.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = 1")
    return connection


def _own(path: str | Path) -> sqlite3.Connection:
    """A lock that the operating system drops with the process: an exclusive transaction on an empty database beside the store."""
    lock = sqlite3.connect(f"{path}.lock", timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        if "locked" not in str(error):
            raise
        raise UserError(f"the store `{path}` is in use by another run", hint="wait for it, end it, or give this run another folder") from error
    return lock


def _select(connection: sqlite3.Connection, head: str, values: Sequence[str]) -> list[tuple[str, ...]]:
    """`head IN (values)`, each value once."""
    unique = list(dict.fromkeys(values))
    found: list[tuple[str, ...]] = []
    for start in range(0, len(unique), CHUNK):
        chunk = unique[start : start + CHUNK]
        found += connection.execute(f"{head} IN ({', '.join('?' for _ in chunk)})", chunk).fetchall()
    return found


def _status(connection: sqlite3.Connection, attempt_id: str) -> str:
    row = connection.execute("SELECT status FROM attempts WHERE id = ?", (attempt_id,)).fetchone()
    if row is None:
        raise StoreError(f"no attempt `{attempt_id}`")
    return row[0]


def _begin(connection: sqlite3.Connection, rollout_id: str, *, worker: str, now: float, lease_until: float) -> tuple[Rollout, Attempt]:
    """The next attempt at a queued rollout."""
    (tries,) = connection.execute("SELECT count(*) FROM attempts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    attempt = Attempt(
        id=f"{rollout_id}.{tries + 1}",
        rollout_id=rollout_id,
        number=tries + 1,
        token=f"lrl-{secrets.token_urlsafe(24)}",
        worker=worker,
        lease_until=lease_until,
        started_at=now,
    )
    connection.execute(f"INSERT INTO attempts ({rows.ATTEMPT}) VALUES ({rows.slots(rows.ATTEMPT)})", rows.attempt_row(attempt))
    connection.execute("UPDATE rollouts SET status = 'running' WHERE id = ?", (rollout_id,))
    row = connection.execute(f"SELECT {rows.ROLLOUT} FROM whole_rollouts WHERE id = ?", (rollout_id,)).fetchone()
    return rows.rollout_of(row), attempt


def _add_reward(connection: sqlite3.Connection, reward: Reward, *, attempt_id: str) -> None:
    if reward.attempt_id != attempt_id:
        raise StoreError(f"a reward for attempt `{reward.attempt_id}` came with attempt `{attempt_id}`")
    if reward.call_id is not None:
        _known(connection, reward.call_id, attempt_id=attempt_id)
    connection.execute(f"INSERT INTO rewards ({rows.REWARD}) VALUES ({rows.slots(rows.REWARD)})", rows.reward_row(reward))


def _known(connection: sqlite3.Connection, call_id: str, *, attempt_id: str) -> None:
    if connection.execute("SELECT 1 FROM calls WHERE id = ? AND attempt_id = ?", (call_id, attempt_id)).fetchone() is None:
        raise StoreError(f"attempt `{attempt_id}` has no call `{call_id}`")


def _base(connection: sqlite3.Connection, call: Call) -> str | None:
    """The call that this one's prompt is written as a difference to."""
    if call.parent_call_id is not None:
        _known(connection, call.parent_call_id, attempt_id=call.attempt_id)
        return call.parent_call_id
    row = connection.execute("SELECT id FROM calls WHERE attempt_id = ? ORDER BY idx DESC LIMIT 1", (call.attempt_id,)).fetchone()
    return None if row is None else row[0]


def _shared(base: Ints, prompt_ids: Ints) -> int:
    """Length of the common prefix."""
    length = min(len(base), len(prompt_ids))
    differs = np.flatnonzero(base[:length] != prompt_ids[:length])
    return int(differs[0]) if len(differs) else length
