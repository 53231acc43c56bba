"""What does a store need of a connection to its database? Statements are in the SQL that SQLite and PostgreSQL share,
with `?` for each value.

`sqlite3.Connection` has it all. `PostgresConnection` wraps a connection of psycopg.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> Cursor: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """How the library of a database begins transactions and reports errors."""

    begin: str
    """The statement that begins a transaction, and waits until no other connection writes."""
    error: type[Exception]
    """The base of its errors."""
    refused: type[Exception]
    """A record broke a constraint."""
    hint: str
    """What a user can check when a commit fails."""
