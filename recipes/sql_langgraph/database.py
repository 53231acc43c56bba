"""A read-only connection to a database, for the agent and the grader, with a limit on the work of a query."""

import sqlite3
from collections.abc import Mapping
from typing import Any, TypeAlias

Row: TypeAlias = tuple[Any, ...]

MAX_STEPS, MAX_ROWS = 200, 1000
"""Limits for a database in memory. A step is 1000 instructions of SQLite's virtual machine. 200 steps take about 10 ms;
queries need far less than one.
"""
FILE_STEPS, FILE_ROWS = 100_000, 100_000
"""Limits for a file, which may be large. The steps take about 5 s."""
MAX_BYTES = 1_000_000
"""Size limit of one value."""

READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})


BROKEN = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }
)
"""Error codes that are not the query's fault."""


class DatabaseFailed(Exception):
    """The database could not be read. This says nothing about the query."""


class Database(sqlite3.Connection):
    """A connection with limits on the steps and the rows of a query."""

    steps, rows = MAX_STEPS, MAX_ROWS


def open_database(source: Mapping[str, Any]) -> Database:
    """Open a script (`setup`) in memory, or a file (`database`). The connection can only read."""
    if "setup" in source:
        connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None, factory=Database)
        connection.executescript(f"PRAGMA journal_mode=OFF;PRAGMA synchronous=OFF;BEGIN;{source['setup']};COMMIT;")
    else:
        connection = sqlite3.connect(
            f"file:{source['database']}?mode=ro", uri=True, check_same_thread=False, factory=Database
        )
        connection.steps, connection.rows = FILE_STEPS, FILE_ROWS
        connection.text_factory = lambda raw: raw.decode(errors="replace")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
    return connection


def run_query(connection: Database, query: str) -> list[Row]:
    """Returns the rows.

    Raises `sqlite3.Error` for a bad query, including one with too much work or too many rows, and `DatabaseFailed` if
    the database cannot be read.
    """
    ticks = iter(range(connection.steps))
    connection.set_progress_handler(lambda: next(ticks, None) is None, 1000)
    try:
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("not a query")
        rows = cursor.fetchmany(connection.rows + 1)
    except sqlite3.Error as error:
        # the lowest byte is the error's class; our own errors have no code
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in BROKEN:
            raise DatabaseFailed(str(error)) from error
        raise
    except sqlite3.Warning as warning:  # two statements in one
        raise sqlite3.ProgrammingError(str(warning)) from warning
    finally:
        connection.set_progress_handler(None, 0)
    if len(rows) > connection.rows:
        raise sqlite3.ProgrammingError("too many rows")
    return rows


def columns_of(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """Each table with its columns."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: [column[0] for column in connection.execute(f'SELECT * FROM "{table}" LIMIT 0').description]
        for (table,) in tables
    }


def is_empty(rows: list[Row]) -> bool:
    """Whether there are no rows, or only NULL and 0: aggregates return those if no row matches."""
    return all(value is None or value == 0 for row in rows for value in row)


def is_ordered(query: str) -> bool:
    return "ORDER BY" in query.upper()


def comparable(rows: list[Row], *, ordered: bool) -> list[str]:
    """Rows as text, sorted unless `ordered`. Numbers have 9 digits: a sum's last ones depend on the row order."""
    texts = [
        repr([float(f"{value:.9g}") if isinstance(value, int | float) else value for value in row]) for row in rows
    ]
    return texts if ordered else sorted(texts)
