"""A store in PostgreSQL, for several servers of one run. `postgresql://user@host/db?schema=NAME`.

One transaction writes at a time: each takes an advisory lock first, as SQLite does with its file. `NOTIFY` tells the
other processes, so nothing polls. Leases follow the clock of the database.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, final

import psycopg

from lightningrl.errors import StoreError, UserError
from lightningrl.store import calls
from lightningrl.store.base import LOOK_S, Records
from lightningrl.store.connection import Connection, Cursor, Driver
from lightningrl.store.lease import Moment
from lightningrl.store.listener import Listener
from lightningrl.store.postgres_connection import (
    READ_ONLY,
    Address,
    InUse,
    PostgresConnection,
    address,
    own,
    plain,
)
from lightningrl.store.postgres_schema import MIGRATIONS, migrate, version_of
from lightningrl.store.sql import SQLStore

HASHES = 100
"""Hashes of tokens in one `NOTIFY`, which takes up to 8,000 bytes."""

HINT = "does the database run, and may this user write to it?"


@final
class PostgresStore(SQLStore):
    """A `Store`. Open it with `await PostgresStore.open("user@host/db?schema=NAME")`."""

    _poll_s = LOOK_S
    _short_times = False
    _sampled = "length(logprobs) / 3"

    def __init__(
        self, place: Address, writer: PostgresConnection, *, reader: PostgresConnection | None, alone: bool
    ) -> None:
        begin = f"BEGIN; SELECT pg_advisory_xact_lock({place.key('writer')})"
        self._driver = Driver(begin=begin, error=psycopg.Error, refused=psycopg.IntegrityError, hint=HINT)
        self._place = place
        self._connection = writer
        self._last_call: int | None = None
        """The greatest number of a call; None: it has to be read."""
        self._inserted: list[Cursor] = []
        """Inserts of calls in the pipeline."""
        super().__init__(writer, reader=reader, alone=alone, read_only=reader is None)
        self._listener = Listener(lambda: plain(place), channel=place.channel, audience=self)

    @classmethod
    async def open(cls, path: str, *, exclusive: bool = False) -> "PostgresStore":
        """Open or create the store. `exclusive`: no other process gives out attempts until `close`. Raises
        `UserError` if another process has claimed the store.
        """
        place = address(path)
        try:
            return await asyncio.to_thread(cls._open, place, exclusive=exclusive)
        except InUse as error:
            hint = "wait for it, end it, or give this run another schema"
            raise UserError(str(error), hint=hint) from error
        except psycopg.Error as error:
            raise UserError(f"cannot open the store `{place.schema}`: {error}", hint=HINT) from error

    @classmethod
    async def read(cls, path: str) -> Records:
        """Open an existing store to read: see `open_records`."""
        place = address(path)
        try:
            return await asyncio.to_thread(cls._read, place)
        except psycopg.Error as error:
            raise UserError(f"cannot read the store `{place.schema}`: {error}", hint=HINT) from error

    @classmethod
    def _open(cls, place: Address, *, exclusive: bool) -> "PostgresStore":
        def connect() -> psycopg.Connection[Any]:
            connection = plain(place)
            if exclusive:
                own(connection, place)
            return connection

        writer = PostgresConnection(connect)
        writer.execute(f"BEGIN; SELECT pg_advisory_xact_lock({place.key('writer')})")
        migrate(writer, place.schema)
        writer.execute("COMMIT")
        return cls(place, writer, reader=PostgresConnection(lambda: plain(place, READ_ONLY)), alone=exclusive)

    @classmethod
    def _read(cls, place: Address) -> "PostgresStore":
        reader = PostgresConnection(lambda: plain(place, READ_ONLY), reads=True)
        version = version_of(reader, place.schema)
        if version < len(MIGRATIONS):
            reader.close()
            what = f"has schema `{version}`, this program reads `{len(MIGRATIONS)}`" if version else "does not exist"
            raise UserError(f"the store `{place.schema}` {what}", hint="continue its run once, or check the URL")
        return cls(place, reader, reader=None, alone=False)

    def began(self, connection: Connection) -> None:
        self._last_call = None
        self._inserted.clear()
        self._connection.start_pipeline()

    def undone(self) -> None:
        self._last_call = None
        self._inserted.clear()
        super().undone()

    async def close(self) -> None:
        if self._connection.reads:
            self._connection.give_up()
        await super().close()
        await asyncio.to_thread(self._listener.close)

    def ending(self, connection: Connection) -> None:
        """Tell the other processes which attempts have changed, and wait for all statements of the pipeline."""
        if self._moved:
            hashes = sorted(self._changed)
            for start in range(0, max(1, len(hashes)), HASHES):
                payload = " ".join(hashes[start : start + HASHES])
                connection.execute("SELECT pg_notify(?, ?)", (self._place.channel, payload))
        self._connection.end_pipeline()
        if any(cursor.rowcount != 1 for cursor in self._inserted):
            raise StoreError("a call came after the end of its attempt")  # the works are done again, one by one

    def insert(self, connection: Connection, statement: str, values: Sequence[Any]) -> int | None:
        row = connection.execute(f"{statement} RETURNING seq", values).fetchone()
        return None if row is None else row[0]

    def insert_call(self, connection: Connection, values: tuple[Any, ...]) -> int | None:
        """Calls are numbered here, since only one transaction writes: so an insert in the pipeline needs no answer."""
        last = self._last_call
        if last is None:
            (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM calls").fetchone()
        self._last_call = seq = last + 1
        cursor = connection.execute(calls.NUMBERED, (seq, *values))
        if self._connection.pipelined:
            self._inserted.append(cursor)
        elif cursor.rowcount != 1:
            return None
        return seq

    def moment(self, connection: Connection, seconds: float) -> Moment:
        (now,) = connection.execute("SELECT extract(epoch FROM clock_timestamp())::double precision").fetchone()
        return Moment(boot=None, ticks=0.0, now=now + seconds)

    @property
    def attentive(self) -> bool:
        return len(self._running) > 0

    def heard(self, pid: int, hashes: list[str]) -> None:
        """Called by the listener, like the next two. What this store has committed, it knows already."""
        if pid != self._connection.pid:
            for hashed in hashes:
                self._running.drop(hashed)
            self._waiters.wake()

    def checked(self, at: float) -> None:
        self._running.confirm(at)

    def deaf(self) -> None:
        self._running.clear()
        self._waiters.wake()
