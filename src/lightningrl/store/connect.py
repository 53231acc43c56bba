"""Connections to the file of a store: to write, to read only, and the lock of the one process that runs attempts."""

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from lightningrl.errors import UserError
from lightningrl.store.connection import Connection
from lightningrl.store.schema import MIGRATIONS, check_version, migrate

PAGE = 8192
"""Bytes. Calls of 700 bytes fill 94 % (4096: 88 %). Larger pages cost CPU in the log (benchmarks/store.py)."""


def connect(path: str | Path) -> sqlite3.Connection:
    """Open or create a file for writing."""
    connection = _connect(str(path))
    connection.execute(f"PRAGMA page_size = {PAGE}")  # of a new file
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def connect_reader(path: str | Path) -> sqlite3.Connection:
    """Open an existing file for reading. A file with an older schema is copied to a temporary database, and the copy is
    migrated, since a run of that older program may be writing to the file.
    """
    resolved = Path(path).resolve()
    parameters = "mode=ro"
    if not os.access(resolved.parent, os.W_OK) and not Path(f"{resolved}-wal").exists():
        parameters += "&immutable=1"  # a read-only disk, where SQLite cannot create the index of the log
    connection = _connect(f"file:{quote(str(resolved))}?{parameters}", uri=True)
    if check_version(connection) == len(MIGRATIONS):
        return connection
    copy = _connect("")  # a private database in memory; SQLite moves it to a temporary file if it grows large
    connection.backup(copy)
    connection.close()
    migrate(copy)
    return copy


def own(path: str | Path) -> sqlite3.Connection:
    """Lock the store for this process: an exclusive transaction on an empty database beside it. The operating system
    drops the lock when the process ends. Raises `UserError` if another process has it.
    """
    lock = sqlite3.connect(f"{path}.lock", timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        if "locked" not in str(error):
            raise
        hint = "wait for it, end it, or give this run another folder"
        raise UserError(f"the store `{path}` is in use by another run", hint=hint) from error
    return lock


def version(connection: Connection) -> int:
    """A number that changes with each commit of another connection."""
    return connection.execute("PRAGMA data_version").fetchone()[0]


def _connect(name: str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=30.0, isolation_level=None, check_same_thread=False, uri=uri)
