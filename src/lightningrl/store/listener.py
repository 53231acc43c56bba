"""What did other processes commit? A thread waits for `NOTIFY` of PostgreSQL.

Each commit that changes rollouts notifies with the hashes of the tokens whose attempts have changed. So nothing polls:
only while attempts are kept in memory, the connection is checked twice a second, since a broken one is silent.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import psycopg
from psycopg import sql

CHECK_S = 0.4
"""Seconds between two checks of the connection. An attempt in memory holds for 1 s after one."""

PAUSE_S = 0.5
"""Seconds between two tries to connect."""


class Audience(Protocol):
    """Is told by the thread what happens."""

    @property
    def attentive(self) -> bool:
        """Whether checks of the connection are needed."""
        ...

    def heard(self, pid: int, hashes: list[str]) -> None:
        """A commit by the connection `pid` has changed rollouts, and the attempts of these tokens."""
        ...

    def checked(self, at: float) -> None:
        """All commits before this time of the monotonic clock were heard."""
        ...

    def deaf(self) -> None:
        """Commits may have been missed."""
        ...


class Listener:
    """The thread. `connect` makes a connection of psycopg."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], *, channel: str, audience: Audience) -> None:
        self._connect = connect
        self._channel = channel
        self._audience = audience
        self._closed = threading.Event()
        self._connection = self._open()
        self._thread = threading.Thread(target=self._listen, name="store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. It sleeps in a read of the socket, so the socket is shut down."""
        self._closed.set()
        if not self._connection.closed:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
                pipe.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _open(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        return connection

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                if self._connection.closed:
                    self._connection = self._open()
                    self._audience.deaf()
                self._hear(CHECK_S)
                if self._audience.attentive:
                    began = time.monotonic()
                    self._connection.execute("SELECT 1")
                    self._hear(0.0)
                    self._audience.checked(began)
            except psycopg.Error:
                self._connection.close()
                self._closed.wait(PAUSE_S)
        self._connection.close()

    def _hear(self, timeout_s: float) -> None:
        for news in self._connection.notifies(timeout=timeout_s):
            self._audience.heard(news.pid, news.payload.split())
