"""A store in SQL: every verb, once, for SQLite and PostgreSQL. One thread writes, with group commits; another reads.

Other processes may read and write the same database.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lightningrl.errors import StoreError
from lightningrl.store import calls, delta, rows, spans
from lightningrl.store.base import ANY, Changes, Outcomes, Where
from lightningrl.store.claims import queued
from lightningrl.store.connection import Connection, Driver
from lightningrl.store.lease import EXTEND, Moment, passed
from lightningrl.store.outcomes import read_outcomes
from lightningrl.store.recent import Recent
from lightningrl.store.running import Running
from lightningrl.store.said import search
from lightningrl.store.search import conditions
from lightningrl.store.thread import DatabaseThread
from lightningrl.store.waiters import Waiters
from lightningrl.types import Attempt, AttemptStatus, Call, Reward, Rollout, RolloutStatus, Span, Weights, hash_token

FORGIVEN = 10
"""Lost attempts of one rollout that do not count against `max_attempts`. A machine may die; but an agent that kills its
worker each time must not run endlessly.
"""

ENDED: tuple[AttemptStatus, ...] = ("succeeded", "failed", "timeout", "lost")
"""The statuses that an attempt can end with."""

PASSED = "the lease passed: the worker of this attempt is gone"
NOT_HELD = "the worker does not run this attempt: it was started again, or never learned of it"
"""Errors of attempts that are lost."""

CHUNK = 500
"""Maximum number of ids in one `IN (…)`; older SQLite builds allow 999 variables. Also of changes read at once."""

MANY = 2**62
"""A `LIMIT` that leaves nothing out."""


class SQLStore:
    """A `Store` over two connections. `SQLiteStore` and `PostgresStore` make them, and say what differs."""

    _driver: Driver
    _poll_s: ClassVar[float]
    """Seconds between two checks of `changes` for commits of other processes."""
    _short_times: ClassVar[bool]
    """Columns may hold values of several types."""
    _sampled: ClassVar[str]
    """An expression for the number of sampled tokens of a row of `calls`, from the length of its logprobs."""

    def __init__(
        self, connection: Connection, *, reader: Connection | None = None, alone: bool = False, read_only: bool = False
    ) -> None:
        """`connection` writes. Without a `reader` it also reads. `alone`: no other process gives out attempts."""
        self._waiters = Waiters()
        self._running = Running()
        self._recent = Recent()
        self._begun: list[tuple[Rollout, Attempt]] = []
        """Attempts that have begun since the last commit."""
        self._blank: set[str] = set()
        """Running attempts without calls. Only in an exclusive store, where no other process adds calls."""
        self._changed: set[str] = set()
        """Token hashes of attempts that have ended or got a longer lease since the last commit."""
        self._moved = False
        """Rollouts may have changed their status since the last commit. A false alarm does no harm."""
        self._alone = alone
        events = None if read_only else self
        self._writer = DatabaseThread(connection, driver=self._driver, name="store-writer", events=events)
        self._reader = self._writer
        if reader is not None:
            self._reader = DatabaseThread(reader, driver=self._driver, name="store-reader", events=None)

    def began(self, connection: Connection) -> None:
        """A transaction of the writer has begun. Called on its thread, like the next four."""

    def ending(self, connection: Connection) -> None:
        """The transaction is about to be committed."""

    def insert(self, connection: Connection, statement: str, values: Sequence[Any]) -> int | None:
        """Insert at most one row, and return its `seq`; None if none was inserted."""
        raise NotImplementedError

    def insert_call(self, connection: Connection, values: tuple[Any, ...]) -> int | None:
        """Insert the row of a call, and return its `seq`; None if its attempt has ended."""
        return self.insert(connection, calls.INSERT, values)

    def moment(self, connection: Connection, seconds: float) -> Moment:
        """`seconds` from now, on the clock of the leases."""
        raise NotImplementedError

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        inputs = [rows.input_row(rollout.task) for rollout in rollouts]
        new = [rows.rollout_row(rollout, digest=digest) for rollout, (digest, _) in zip(rollouts, inputs, strict=True)]

        def work(connection: Connection) -> None:
            connection.executemany("INSERT INTO inputs (digest, input) VALUES (?, ?) ON CONFLICT DO NOTHING", inputs)
            self._moved |= connection.executemany(rows.ENQUEUE, new).rowcount > 0

        await self._writer.run(work)

    async def claim(
        self,
        worker: str,
        *,
        limit: int,
        lease_s: float,
        labels: Collection[str] = (),
        holding: Collection[str] | None = None,
        gateway: str = "",
    ) -> list[tuple[Rollout, Attempt]]:
        def work(connection: Connection) -> list[tuple[Rollout, Attempt]]:
            self._lose(connection, passed(connection, self.moment(connection, 0.0)), why=PASSED)
            if holding is not None:
                theirs = connection.execute(rows.RUNNING, (worker, gateway)).fetchall()
                self._lose(connection, [row[0] for row in theirs if row[0] not in holding], why=NOT_HELD)
            found = queued(connection, labels, limit=limit)
            lease = self.moment(connection, lease_s)
            begun = [self._begin(connection, row, worker=worker, gateway=gateway, lease=lease) for row in found]
            self._begun += begun
            return begun

        return await self._writer.run(work)

    async def heartbeat(self, attempt_ids: Sequence[str], *, lease_s: float, worker: str | None = None) -> set[str]:
        def work(connection: Connection) -> set[str]:
            lease = self.moment(connection, lease_s)
            kept: set[str] = set()
            for attempt_id in attempt_ids:
                attempt = rows.find_attempt(connection, attempt_id)
                if attempt is not None and attempt.runs(worker):
                    connection.execute(f"{EXTEND} WHERE seq = ?", (lease.now, lease.boot, lease.ticks, attempt.seq))
                    self._changed.add(attempt.token.hex())
                    kept.add(attempt_id)
            return kept

        return await self._writer.run(work)

    async def finish(
        self,
        attempt_id: str,
        status: AttemptStatus,
        *,
        rewards: Sequence[Reward] = (),
        output: object = None,
        error: str | None = None,
        worker: str | None = None,
    ) -> None:
        if status not in ENDED:
            raise StoreError(f"an attempt cannot end as `{status}`", hint="one of: " + ", ".join(ENDED))
        output_json = rows.to_json(output)

        def work(connection: Connection) -> None:
            attempt = rows.the_attempt(connection, attempt_id)
            if not attempt.runs(worker):
                return  # the first `finish` counts
            for reward in rewards:
                if reward.attempt_id != attempt_id:
                    raise StoreError(f"a reward for attempt `{reward.attempt_id}` came with attempt `{attempt_id}`")
                self._add_reward(connection, reward, attempt=attempt.seq)
            self._end(connection, attempt_id, attempt, status, output=output_json, error=error)

        await self._writer.run(work)

    async def append(self, *records: Call | Reward | Span) -> None:
        for record in records:
            if isinstance(record, Call):
                calls.check(record)

        def work(connection: Connection) -> None:
            for record in records:
                if isinstance(record, Call):
                    self._add_call(connection, record)
                elif isinstance(record, Span):
                    self._add_span(connection, record)
                else:
                    attempt = rows.the_attempt(connection, record.attempt_id)
                    if attempt.status != "running":
                        raise _ended(record.attempt_id)
                    self._add_reward(connection, record, attempt=attempt.seq)

        await self._writer.run(work)

    async def attempt_by_token(self, token: str) -> tuple[Rollout, Attempt] | None:
        hashed = hash_token(token)

        def work(connection: Connection) -> tuple[Rollout, Attempt] | None:
            by_token = f"SELECT {rows.ATTEMPT} FROM whole_attempts WHERE token = ?"
            row = connection.execute(by_token, (bytes.fromhex(hashed),)).fetchone()
            if row is None:
                return None
            by_id = f"SELECT {rows.ROLLOUT} FROM whole_rollouts WHERE id = ?"
            rollout = connection.execute(by_id, (row[1],)).fetchone()
            return rows.rollout_of(rollout), replace(rows.attempt_of(row), token=token)

        return self._running.get(hashed) or await self._running.read(hashed, lambda: self._reader.run(work))

    async def rollouts(
        self,
        *,
        ids: Sequence[str] | None = None,
        group_ids: Sequence[str] | None = None,
        where: Where = ANY,
        before: str | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        def named(connection: Connection) -> list[Rollout]:
            select = f"SELECT seq, {rows.ROLLOUT} FROM whole_rollouts WHERE"
            found = _select(connection, f"{select} id", ids or ())
            found += _select(connection, f"{select} group_id", group_ids or ())
            return [rows.rollout_of(row[1:]) for row in sorted(set(found))]

        def filtered(connection: Connection) -> list[Rollout]:
            condition, values = conditions(where, before=before)
            latest = f"SELECT {rows.ROLLOUT} FROM whole_rollouts WHERE {condition} ORDER BY seq DESC LIMIT ?"
            found = connection.execute(latest, [*values, MANY if limit is None else limit]).fetchall()
            return [rows.rollout_of(row) for row in reversed(found)]

        return await self._reader.run(filtered if ids is None and group_ids is None else named)

    async def count(self, where: Where = ANY) -> dict[RolloutStatus, int]:
        condition, values = conditions(where)
        statement = f"SELECT status, count(*) FROM whole_rollouts WHERE {condition} GROUP BY status"
        return await self._reader.run(lambda connection: dict(connection.execute(statement, values).fetchall()))

    async def changes(self, after: int | None = None, *, timeout_s: float = 0.0) -> Changes:
        def look(connection: Connection) -> Changes:
            if after is None:
                (cursor,) = connection.execute("SELECT coalesce(max(changed), 0) FROM rollouts").fetchone()
                return Changes(cursor=cursor, rollouts=())
            later = f"SELECT changed, {rows.ROLLOUT} FROM whole_rollouts WHERE changed > ? ORDER BY changed LIMIT ?"
            found = connection.execute(later, (after, CHUNK)).fetchall()
            cursor = found[-1][0] if found else after
            return Changes(cursor=cursor, rollouts=tuple(rows.rollout_of(row[1:]) for row in found))

        deadline = time.monotonic() + timeout_s
        while True:
            with self._waiters.register() as news:
                found = await self._reader.run(look)
                left = deadline - time.monotonic()
                if found.rollouts or after is None or left <= 0:
                    return found
                await asyncio.wait([news], timeout=min(left, self._poll_s))

    async def outcomes(self, *, after: int | None = None, before: int | None = None, limit: int = 2000) -> Outcomes:
        def work(connection: Connection) -> Outcomes:
            return read_outcomes(connection, after=after, before=before, limit=limit, sampled=self._sampled)

        return await self._reader.run(work)

    async def places(self, where: Where) -> list[int]:
        condition, values = conditions(where)
        statement = f"SELECT seq FROM whole_rollouts WHERE {condition}"
        return await self._reader.run(
            lambda connection: [row[0] for row in connection.execute(statement, values).fetchall()]
        )

    async def said(self, text: str, *, places: Sequence[int]) -> dict[int, str]:
        return await self._reader.run(lambda connection: search(connection, text, places=places))

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        def work(connection: Connection) -> list[Attempt]:
            found = _select(connection, f"SELECT {rows.ATTEMPT} FROM whole_attempts WHERE rollout_id", rollout_ids)
            order = {rollout_id: place for place, rollout_id in enumerate(rollout_ids)}
            return [rows.attempt_of(row) for row in sorted(found, key=lambda row: (order[row[1]], row[2]))]

        return await self._reader.run(work)

    async def calls(self, attempt_ids: Sequence[str]) -> list[Call]:
        if self._blank.issuperset(attempt_ids):  # true at the first request of an attempt: no thread has to wake up
            return []
        return await self._reader.run(lambda connection: calls.read_calls(connection, attempt_ids))

    async def rewards(self, attempt_ids: Sequence[str]) -> list[Reward]:
        def work(connection: Connection) -> list[Reward]:
            return [reward for attempt_id in attempt_ids for reward in calls.read_rewards(connection, attempt_id)]

        return await self._reader.run(work)

    async def spans(self, attempt_ids: Sequence[str]) -> list[Span]:
        def work(connection: Connection) -> list[Span]:
            return [span for attempt_id in attempt_ids for span in spans.read_spans(connection, attempt_id)]

        return await self._reader.run(work)

    async def publish(self, weights: Weights) -> None:
        row = (weights.policy, weights.version, weights.uri, weights.kind)
        insert = "INSERT INTO weights VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
        await self._writer.run(lambda connection: connection.execute(insert, row))

    async def weights(self, policy: str) -> Weights | None:
        def work(connection: Connection) -> Weights | None:
            statement = "SELECT policy, version, uri, kind FROM weights WHERE policy = ? ORDER BY version DESC LIMIT 1"
            row = connection.execute(statement, (policy,)).fetchone()
            return None if row is None else rows.weights_of(row)

        return await self._reader.run(work)

    def committed(self) -> None:
        """Called on the writer thread."""
        self._recent.settle()
        for found in self._begun:
            self._running.add(found)
            if self._alone:
                self._blank.add(found[1].id)
        for hashed in self._changed:
            self._running.drop(hashed)
        self._begun.clear()
        self._changed.clear()
        if self._moved:
            self._waiters.wake()
        self._moved = False

    def undone(self) -> None:
        """Called on the writer thread. Memory that is dropped without need is read from the file again."""
        self._recent.forget()
        self._begun.clear()

    def _begin(
        self, connection: Connection, row: tuple[Any, ...], *, worker: str, gateway: str, lease: Moment
    ) -> tuple[Rollout, Attempt]:
        """The next attempt at a queued rollout."""
        rollout = replace(rows.rollout_of(row), status="running")
        tally = "SELECT count(*) FROM whole_attempts WHERE rollout_id = ?"
        (tries,) = connection.execute(tally, (rollout.id,)).fetchone()
        token = rows.new_token()
        attempt = Attempt(
            id=rows.attempt_id(rollout.id, tries + 1),
            rollout_id=rollout.id,
            number=tries + 1,
            token=token,
            token_hash=hash_token(token),
            worker=worker,
            gateway=gateway,
            lease_until=lease.now,
            started_at=time.time(),
        )
        seq = self.insert(connection, rows.BEGIN, rows.attempt_row(attempt, lease))
        assert seq is not None
        connection.execute(rows.STATUS, ("running", rollout.id))
        self._moved = True
        self._recent.begin(attempt.id, seq)
        return rollout, attempt

    def _lose(self, connection: Connection, attempt_ids: Sequence[str], *, why: str) -> None:
        for attempt_id in attempt_ids:
            attempt = rows.the_attempt(connection, attempt_id)
            self._end(connection, attempt_id, attempt, "lost", output="null", error=why)

    def _end(
        self,
        connection: Connection,
        attempt_id: str,
        attempt: rows.AttemptKey,
        status: AttemptStatus,
        *,
        output: str,
        error: str | None,
    ) -> None:
        """End a running attempt, and requeue, accept or fail its rollout."""
        rollout_id, number = rows.attempt_key(attempt_id)
        change = "UPDATE attempts SET status = ?, output = ?, error = ?, ended_at = ? WHERE seq = ?"
        connection.execute(change, (status, output, rows.clean(error), time.time(), attempt.seq))
        if status == "succeeded":
            connection.execute("UPDATE rollouts SET accepted = ? WHERE id = ?", (number, rollout_id))
            after = "succeeded"
        else:
            tally = "SELECT count(*), count(*) FILTER (WHERE status = 'lost') FROM whole_attempts WHERE rollout_id = ?"
            tries, lost = connection.execute(tally, (rollout_id,)).fetchone()
            (allowed,) = connection.execute("SELECT max_attempts FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            after = "queued" if tries - min(lost, FORGIVEN) < allowed else "failed"
        connection.execute(rows.STATUS, (after, rollout_id))
        self._moved = True
        self._changed.add(attempt.token.hex())
        self._blank.discard(attempt_id)
        self._recent.close(attempt_id)

    def _add_call(self, connection: Connection, call: Call) -> None:
        book = self._recent.book(connection, call.attempt_id)
        self._blank.discard(call.attempt_id)
        if call.id in book.calls:
            raise StoreError(f"attempt `{call.attempt_id}` has a call `{call.id}` already")
        request = rows.to_json_bytes(call.request)
        base, earlier = self._recent.base(connection, call, request)
        content = calls.content_of(call, request, base=earlier)
        written = delta.write(content, call.logprobs, earlier, prompt_length=len(call.prompt_ids))
        name = calls.name_of(call)
        row = calls.row_of(
            call,
            written,
            attempt=book.seq,
            kind=self._recent.kind(connection, call, name),
            named=bool(name),
            base=base,
            short_times=self._short_times,
        )
        seq = self.insert_call(connection, row)
        if seq is None:
            raise _ended(call.attempt_id)
        self._recent.keep(call, seq, content, base=base)

    def _add_reward(self, connection: Connection, reward: Reward, *, attempt: int) -> None:
        call = None if reward.call_id is None else self._recent.call(connection, reward.attempt_id, reward.call_id)
        row = rows.reward_row(reward, attempt=attempt, call=call)
        connection.execute("INSERT INTO rewards (attempt, call, name, value, source) VALUES (?, ?, ?, ?, ?)", row)

    def _add_span(self, connection: Connection, span: Span) -> None:
        attempt = spans.open_attempt(connection, span.attempt_id)
        call = None if span.call_id is None else self._recent.call(connection, span.attempt_id, span.call_id)
        connection.execute(spans.INSERT, spans.row_of(span, attempt=attempt, call=call))


def _select(connection: Connection, head: str, values: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows of `head IN (values)`."""
    unique = list(dict.fromkeys(values))
    found: list[tuple[str, ...]] = []
    for start in range(0, len(unique), CHUNK):
        chunk = unique[start : start + CHUNK]
        found += connection.execute(f"{head} IN ({', '.join('?' for _ in chunk)})", chunk).fetchall()
    return found


def _ended(attempt_id: str) -> StoreError:
    return StoreError(f"attempt `{attempt_id}` has ended: it takes no more records")
