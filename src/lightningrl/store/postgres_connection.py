"""A connection to PostgreSQL, used like one to SQLite. It connects again when it was lost.

A statement outside of a transaction, or the one that begins a transaction, is sent again on the new connection. Inside
a transaction nothing is repeated here: the caller gets the error, and the database has rolled everything back.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrDumperUnknown

from lightningrl.errors import UserError

RECONNECT_S = 30.0
"""Seconds for which a lost connection is tried again. A restart of a database takes a few."""

READER_RECONNECT_S = 2.0
"""The same for one that only reads, from the loss on: people who wait for an answer want to know."""

OWNED_S = 3.0
"""Seconds that a new server waits for the lock of a predecessor: the database notices later that it was killed."""

KEEPALIVE = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3", "connect_timeout": "10"}
"""A connection to a machine that is gone fails after 25 s."""

SETTINGS = {
    "synchronous_commit": "on",
    "default_transaction_isolation": "read committed",
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "10s",  # a gateway that hangs in a commit would stop all others
    "tcp_keepalives_idle": "10",  # the database frees the locks of a machine that is gone after 25 s as well
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "jit": "off",  # compiling a statement takes longer than running it
}

READ_ONLY = {**SETTINGS, "default_transaction_read_only": "on"}


class InUse(psycopg.OperationalError):
    """Another process has claimed the store."""


class _Text(StrDumperUnknown):
    """PostgreSQL has no text with NUL."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\\x00"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the store of a run is."""

    url: str
    """What libpq gets."""
    schema: str

    @property
    def channel(self) -> str:
        """The channel of `NOTIFY`; unlike names, it has no special characters."""
        return f"lightningrl_{hashlib.blake2b(self.schema.encode(), digest_size=8).hexdigest()}"

    def key(self, purpose: str) -> int:
        """The number of an advisory lock."""
        digest = hashlib.blake2b(f"{purpose} {self.schema}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)


def address(url: str) -> Address:
    """`user@host/db?schema=NAME`, after the scheme. Raises `UserError` for a bad name of a schema."""
    server, _, query = url.partition("?")
    options = dict(parse_qsl(query))
    schema = options.pop("schema", "lightningrl")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,62}", schema) or schema.startswith("pg_"):
        hint = "use up to 63 small letters, digits, `_` and `-`, e.g. `?schema=my_run`"
        raise UserError(f"`{schema}` cannot be the schema of a store", hint=hint)
    return Address(url=f"postgresql://{server}?{urlencode(options)}", schema=schema)


def plain(address: Address, settings: Mapping[str, str] = SETTINGS) -> psycopg.Connection[Any]:
    """A new connection of psycopg. Raises `psycopg.Error`."""
    info = make_conninfo(**{**KEEPALIVE, **conninfo_to_dict(address.url)})
    connection = psycopg.connect(info, autocommit=True, cursor_factory=psycopg.RawCursor)
    connection.adapters.register_dumper(str, _Text)
    connection.adapters.register_dumper(int, Int8BinaryDumper)
    for name, value in settings.items():
        connection.execute("SELECT set_config($1, $2, false)", (name, value))
    connection.execute("SELECT set_config('search_path', $1, false)", (f'"{address.schema}"',))
    return connection


class PostgresConnection:
    """A `Connection`. `connect` makes a new connection of psycopg. `reads`: it never writes, so its statements may
    fail early.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], *, reads: bool = False) -> None:
        self._connect, self.reads = connect, reads
        self._deadline: float | None = None
        """When a lost connection is given up; None: it was found again, or never lost."""
        self._ending = threading.Event()
        self._connection = connect()
        self.pid = self._connection.info.backend_pid
        """The process of the database that serves this connection, or served it until it was lost."""
        self._pipeline: psycopg.Pipeline | None = None
        self._leave = ExitStack()
        """Ends the pipeline."""
        self.in_transaction = False
        """From `BEGIN` until `COMMIT` or `ROLLBACK`, also if the connection is lost meanwhile."""

    @property
    def pipelined(self) -> bool:
        return self._pipeline is not None

    def start_pipeline(self) -> None:
        """From now on, statements are sent without waiting for their results, until one is read. An error is raised
        later than its statement. Only within a transaction; its end ends the pipeline as well.
        """
        self._pipeline = self._leave.enter_context(self._connection.pipeline())

    def end_pipeline(self) -> None:
        """Wait for all results. Raises the first error."""
        self._pipeline = None
        self._leave.close()

    def execute(self, statement: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        inside = self.in_transaction
        if statement.startswith("BEGIN"):
            self.in_transaction = True
        elif statement == "ROLLBACK":
            self.in_transaction = False
            with suppress(psycopg.Error):  # its errors are why the transaction is rolled back
                self.end_pipeline()
        while True:
            try:
                # Statements without values may be several at once: the simple protocol, which has no binary results.
                binary = bool(values) or self._pipeline is not None
                cursor = self._connection.cursor(binary=binary).execute(_numbered(statement), values or None)
                self.in_transaction &= statement != "COMMIT"
                return cursor
            except psycopg.OperationalError as error:
                if statement == "ROLLBACK" or error.diag.severity_nonlocalized in ("FATAL", "PANIC"):
                    self._connection.close()  # psycopg may notice the loss only at the next statement
                if inside or not self._connection.closed:
                    raise
                self._reconnect()

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> psycopg.Cursor[Any]:
        cursor = self._connection.cursor()
        cursor.executemany(_numbered(statement), list(values))
        if self._pipeline is not None:
            self._pipeline.sync()
        return cursor

    def give_up(self) -> None:
        """From now on, a lost connection is not tried again. Any thread may call it."""
        self._ending.set()

    def close(self) -> None:
        self._connection.close()

    def _reconnect(self) -> None:
        with suppress(psycopg.Error):
            self.end_pipeline()
        deadline = self._deadline if self.reads else None
        if deadline is None:
            deadline = time.monotonic() + (READER_RECONNECT_S if self.reads else RECONNECT_S)
        self._deadline, pause_s = deadline, 0.05
        while True:
            try:
                self._connection = self._connect()
                self.pid = self._connection.info.backend_pid
                self._deadline = None
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._ending.wait(pause_s):
                    raise
                pause_s = min(1.0, 2 * pause_s)


def own(connection: psycopg.Connection[Any], address: Address) -> None:
    """Lock the store for this connection. Raises `InUse` if another connection has the lock."""
    deadline = time.monotonic() + OWNED_S
    while connection.execute("SELECT 1 WHERE pg_try_advisory_lock($1)", (address.key("owner"),)).fetchone() is None:
        if time.monotonic() > deadline:
            connection.close()
            raise InUse(f"the store `{address.schema}` is in use by another run")
        time.sleep(0.05)


@lru_cache(4096)
def _numbered(statement: str) -> Any:
    """In PostgreSQL, placeholders have numbers, and `ILIKE` takes ASCII letters in either case."""
    pieces = statement.replace(" LIKE ", " ILIKE ").split("?")
    return "".join(f"{piece}${number}" for number, piece in enumerate(pieces[:-1], start=1)) + pieces[-1]
