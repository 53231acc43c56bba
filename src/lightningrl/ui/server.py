"""Serve the page while a block runs, and say when nobody has looked at it for a while."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from lightningrl.gateway.server import listening
from lightningrl.ui.app import create_app
from lightningrl.ui.live import Live
from lightningrl.ui.shelf import Shelf

LOOK_S = 5.0
"""Seconds between two looks at whether anybody is there."""


class Visits:
    """An app that knows when it was last asked."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0
        self._asked_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            self._asked_at = time.monotonic()

    async def ended(self, idle_s: float) -> None:
        """Wait until there was no request for so long. A live stream is a request that goes on."""
        while self._open or time.monotonic() - self._asked_at < idle_s:
            await asyncio.sleep(min(LOOK_S, idle_s))


@asynccontextmanager
async def serving(
    paths: Sequence[Path], sock: socket.socket, *, key: str | None = None, host: str = ""
) -> AsyncIterator[Visits]:
    """Serve the runs at these paths. `key` and `host`: see `create_app`."""
    shelf, live = Shelf(paths), Live()
    visits = Visits(create_app(shelf, live, key=key, host=host))
    try:
        async with listening(visits, sock):
            try:
                yield visits
            finally:
                live.close()
    finally:
        await shelf.close()
