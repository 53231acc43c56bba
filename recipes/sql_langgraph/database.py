"""How does the agent reach a database, and the grader? Through a connection that can only read, and never for long."""

import sqlite3
from collections.abc import Mapping
from typing import Any, TypeAlias

Row: TypeAlias = tuple[Any, ...]

MAX_STEPS, MAX_ROWS = 200, 1000
"""For a database made here. Thousands of SQLite's virtual machine instructions: about 10 ms, where queries need far
less than one thousand.
"""
FILE_STEPS, FILE_ROWS = 100_000, 100_000
"""For a file, which may be large: about 5 s."""
MAX_BYTES = 1_000_000
"""Of one value."""

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
"""Codes of errors that no query is to blame for."""


class DatabaseFailed(Exception):
    """The database could not be read: what came of a query says nothing about the query."""


class Database(sqlite3.Connection):
    """A connection that knows how much work a query may be."""

    steps, rows = MAX_STEPS, MAX_ROWS


def open_database(source: Mapping[str, Any]) -> Database:
    """From a script (`setup`) in memory, or from a file (`database`). Only reading is allowed from then on."""
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
    """The rows. Raises `sqlite3.Error` for anything wrong with the query, too much work and too many rows included, and
    `DatabaseFailed` for what is wrong with the database.
    """
    ticks = iter(range(connection.steps))
    connection.set_progress_handler(lambda: next(ticks, None) is None, 1000)
    try:
        cursor = connection.execute(query)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("not a query")
        rows = cursor.fetchmany(connection.rows + 1)
    except sqlite3.Error as error:
        if (
            getattr(error, "sqlite_errorcode", 0) & 0xFF in BROKEN
        ):  # the lowest byte: the others go into detail; our own errors have none
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
    """Every table with its columns."""
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {
        table: [column[0] for column in connection.execute(f'SELECT * FROM "{table}" LIMIT 0').description]
        for (table,) in tables
    }


def is_empty(rows: list[Row]) -> bool:
    """Nothing found: no rows, or only NULL and 0, which is what aggregates say of no rows."""
    return all(value is None or value == 0 for row in rows for value in row)


def is_ordered(query: str) -> bool:
    return "ORDER BY" in query.upper()


def comparable(rows: list[Row], *, ordered: bool) -> list[str]:
    """Rows as text, in an order of their own unless it is `ordered`. Numbers to 9 digits: the last ones of a sum depend
    on the order of the rows.
    """
    texts = [
        repr([float(f"{value:.9g}") if isinstance(value, int | float) else value for value in row]) for row in rows
    ]
    return texts if ordered else sorted(texts)
