"""A network that fails on demand: a TCP proxy between one worker and its server.

hold    nothing gets through for a while, in neither direction; then everything that was sent arrives
lose    nothing gets through, and what was sent is lost; then all connections are reset
reset   all connections are reset at once, and new ones too, for a while
"""

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Literal, TypeAlias

Cut: TypeAlias = Literal["hold", "lose", "reset"]
CHUNK = 65536
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing a connection resets it."""


class Proxy:
    """Forwards connections to `port` on the loopback of this machine. `listen` gives the port to connect to."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._cut: Cut | None = None
        self._whole = asyncio.Event()
        self._whole.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def cut(self) -> Cut | None:
        """How the network fails now; None: it works."""
        return self._cut

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def fail(self, how: Cut) -> None:
        self._cut = how
        self._whole.clear()
        if how == "reset":
            self._reset()

    def heal(self) -> None:
        if self._cut == "lose":
            self._reset()
        self._cut = None
        self._whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _reset(self) -> None:
        for end in self._ends:
            _reset(end)
        self._ends.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut == "reset":
            return _reset(writer)
        self._ends.add(writer)
        await self._whole.wait()
        if writer not in self._ends:  # it was reset meanwhile
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            self._ends.discard(writer)
            return _reset(writer)
        self._ends.add(back)
        for source, target in ((reader, back), (there, writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Forward one direction until its end."""
        with suppress(OSError):
            while data := await source.read(CHUNK):
                if self._cut == "lose":
                    continue
                await self._whole.wait()
                target.write(data)
                await target.drain()
            await self._whole.wait()
            if target.can_write_eof():
                target.write_eof()
            return
        _reset(target)
        self._ends.discard(target)


def _reset(end: asyncio.StreamWriter) -> None:
    connection = end.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    end.transport.abort()
