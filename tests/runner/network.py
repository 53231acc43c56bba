"""A network between a worker and its server that a test can cut, or that drops what is sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Network:
    """Forwards TCP connections to `port`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.drops = False
        """What is sent now never arrives, on these connections; nobody is told."""
        self.is_cut = False
        """New connections are reset."""
        self.url = ""
        self.opened = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset all connections, and those that come until `is_cut` is False again."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        if self.is_cut:
            writer.transport.abort()
            return
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._copy(reader, away), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if not self.drops:
                    writer.write(data)
                    await writer.drain()
        self._writers.discard(writer)
        writer.close()


@asynccontextmanager
async def network(url: str) -> AsyncIterator[Network]:
    """A network to the server at `url`."""
    between = Network(int(url.rpartition(":")[2]))
    server = await asyncio.start_server(between.serve, "127.0.0.1", 0)
    between.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield between
    finally:
        server.close()
        between.cut()
        await asyncio.sleep(0.01)
