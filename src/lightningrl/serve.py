"""The Lightning Server: gateway + store + engines (+ trainer), put together from a configuration and taken apart again."""

import asyncio
import contextlib
import fnmatch
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from lightningrl import plugins
from lightningrl.config import Config, GatewayConfig
from lightningrl.errors import UserError
from lightningrl.loop import Loop, Watcher
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.store import Store, open_store


@asynccontextmanager
async def listening(app: Any, config: GatewayConfig) -> AsyncIterator[str]:
    """Serve `app` while the block runs; yields its base URL."""
    try:
        sock = socket.create_server((config.host, config.port), backlog=2048)
    except OSError as error:
        raise UserError(f"cannot listen on `{config.host}:{config.port}`: {error.strerror}", hint="set `gateway.port=0` to take any free port") from error
    server = _Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False, timeout_graceful_shutdown=5))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://{config.host}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """Leaves signals to the process it is part of."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield
