"""Connections to the file of a store: to write, to read alone, and the lock of the one process that runs attempts."""

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from lightningrl.errors import UserError
from lightningrl.store.schema import MIGRATIONS, check_version, migrate

PAGE = 8192
"""Bytes. Pages of 4096 are filled to 88 % by calls of 700 bytes, these to 94 %; larger ones cost CPU in the log
(`benchmarks/store.py`).
"""


def connect(path: str | Path) -> sqlite3.Connection:
    """Open or create a file to write to."""
    connection = _connect(str(path))
    connection.execute(f"PRAGMA page_size = {PAGE}")  # of a new file
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def connect_reader(path: str | Path) -> sqlite3.Connection:
    """Open an existing file for reading alone. A file with an older schema is copied to a temporary database, and the
    copy is migrated: a run of that older program may be writing to the file.
    """
    resolved = Path(path).resolve()
    parameters = "mode=ro"
    if not os.access(resolved.parent, os.W_OK) and not Path(f"{resolved}-wal").exists():
        parameters += (
            "&immutable=1"  # a run that has ended, on a read-only disk: SQLite cannot create the index of its log
        )
    connection = _connect(f"file:{quote(str(resolved))}?{parameters}", uri=True)
    if check_version(connection) == len(MIGRATIONS):
        return connection
    copy = _connect("")  # a database of this connection's own, in memory and, where it is large, in a temporary file
    connection.backup(copy)
    connection.close()
    migrate(copy)
    return copy


def own(path: str | Path) -> sqlite3.Connection:
    """A lock that the operating system drops with the process: an exclusive transaction on an empty database beside the
    store.
    """
    lock = sqlite3.connect(f"{path}.lock", timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        if "locked" not in str(error):
            raise
        raise UserError(
            f"the store `{path}` is in use by another run", hint="wait for it, end it, or give this run another folder"
        ) from error
    return lock


def version(connection: sqlite3.Connection) -> int:
    """A number that changes when another connection has committed."""
    return connection.execute("PRAGMA data_version").fetchone()[0]


def _connect(name: str, *, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=30.0, isolation_level=None, check_same_thread=False, uri=uri)
