"""The way out of a sandbox: connections to its listening socket are taken on to one address, and nowhere else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, cast


@asynccontextmanager
async def door(control: socket.socket, *, host: str, port: int) -> AsyncIterator[None]:
    """Take connections to `host:port` while the block runs. The sandbox sends its listening socket over `control`."""
    ends: set[_End] = set()
    opening = asyncio.create_task(_open(control, ends, host=host, port=port))
    try:
        yield
    finally:
        opening.cancel()
        await asyncio.wait((opening,))
        if not opening.cancelled() and (server := opening.result()) is not None:
            server.close()
        for end in list(ends):
            end.abort()


async def _open(control: socket.socket, ends: "set[_End]", *, host: str, port: int) -> asyncio.Server | None:
    """The server on the sandbox's socket. None: the sandbox has ended before it sent one."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(control, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(control)
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not descriptors:
        return None

    async def connect(inner: _End) -> None:
        try:
            _, outer = await loop.create_connection(lambda: _End(ends), host, port)
        except OSError:
            inner.abort()
        else:
            inner.join(outer)

    return await loop.create_server(lambda: _End(ends, connect=connect), sock=socket.socket(fileno=descriptors[0]))


class _End(asyncio.Protocol):
    """One connection of two: what arrives on it is written to the other."""

    def __init__(self, ends: "set[_End]", *, connect: "Connect | None" = None) -> None:
        """`connect`: makes the other connection, and joins the two. None: this is the other one."""
        self._ends = ends
        self._connect = connect
        self._connecting: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "it is connected"
        return self._transport

    def join(self, other: "_End") -> None:
        self._other, other._other = other, self
        if self.transport.is_closing():
            other.abort()
        else:
            self.transport.resume_reading()

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ends.add(self)
        if self._connect is not None:
            self.transport.pause_reading()  # until the two are joined
            self._connecting = asyncio.create_task(self._connect(self))

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.transport.is_closing():
            self._other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._other is not None:
            self._other.transport.close()  # once it has written what arrived here


Connect: TypeAlias = Callable[[_End], Coroutine[Any, Any, None]]
