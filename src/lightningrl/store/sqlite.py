"""The default store: one SQLite file. Write-ahead log, `synchronous=FULL`, and one writer thread with group commits.

Other processes may read and write the same file. `changes` wakes at once for commits of this object, and checks for
those of other processes four times a second.
"""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, final

from lightningrl.errors import UserError
from lightningrl.store.base import Records
from lightningrl.store.connect import connect, connect_reader, own, version
from lightningrl.store.connection import Connection, Driver
from lightningrl.store.lease import Moment, in_seconds
from lightningrl.store.schema import migrate
from lightningrl.store.sql import SQLStore


@final
class SQLiteStore(SQLStore):
    """A `Store`. Open it with `await SQLiteStore.open(path)`. `:memory:` lives as long as the object."""

    _driver = Driver(
        begin="BEGIN IMMEDIATE",
        error=sqlite3.Error,
        refused=sqlite3.IntegrityError,
        hint="is the disk full, or the file locked by another program?",
    )
    _poll_s = 0.25  # one check costs 0.1 ms, a look at an index
    _short_times = True
    _sampled = "length(logprobs) / CASE typeof(body) WHEN 'text' THEN 4 ELSE 3 END"  # 4: rows of the first schema

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        reader: sqlite3.Connection | None = None,
        lock: sqlite3.Connection | None = None,
        read_only: bool = False,
    ) -> None:
        self._version = version(connection)
        self._lock = lock
        super().__init__(connection, reader=reader, alone=lock is not None, read_only=read_only)

    @classmethod
    async def open(cls, path: str | Path, *, exclusive: bool = False) -> "SQLiteStore":
        """Open or create the file. `exclusive`: no other process gives out attempts until `close`. Raises
        `UserError` if another process has claimed the file.
        """
        memory = str(path) == ":memory:"
        try:
            lock = own(path) if exclusive and not memory else None
            writer = connect(path)
            migrate(writer)
            reader = None if memory else connect(path)
            if reader is not None:
                reader.execute("PRAGMA query_only = 1")
        except sqlite3.Error as error:
            hint = "is it a SQLite file, in a folder that exists and is writable?"
            raise UserError(f"cannot open the store `{path}`: {error}", hint=hint) from error
        return cls(writer, reader=reader, lock=lock)

    @classmethod
    async def read(cls, path: str | Path) -> Records:
        """Open an existing file to read: see `open_records`."""
        try:
            return cls(connect_reader(path), read_only=True)
        except sqlite3.Error as error:
            hint = "is it the store.sqlite of a run?"
            raise UserError(f"cannot read the store `{path}`: {error}", hint=hint) from error

    async def close(self) -> None:
        await super().close()
        if self._lock is not None:
            self._lock.close()

    def began(self, connection: Connection) -> None:
        """Check whether another process has changed the file since the last commit."""
        now = time.monotonic()
        now_at = version(connection)
        if now_at != self._version:
            self._version = now_at
            self._running.clear()
        self._running.confirm(now)

    def insert(self, connection: Connection, statement: str, values: Sequence[Any]) -> int | None:
        cursor = cast(sqlite3.Cursor, connection.execute(statement, values))  # `RETURNING` would cost 3 us
        return cursor.lastrowid if cursor.rowcount == 1 else None

    def moment(self, connection: Connection, seconds: float) -> Moment:
        return in_seconds(seconds)
