"""The HTTP server: a socket, and uvicorn listening on it while a block runs."""

import asyncio
import contextlib
import gc
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from lightningrl.config import GatewayConfig
from lightningrl.errors import UserError
from lightningrl.gateway.connection import Connection

GARBAGE = 20_000
"""Garbage collection threshold; the default of 700 costs a busy gateway 10 % of its CPU (benchmarks/gateway.py)."""
OPEN_FILES = 65536
"""Limit of open files and sockets, if the system allows it."""
KEPT_ALIVE_S = 120
"""Idle connections stay open for longer than clients keep them in their pools, so that the client closes first."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
ENDING_S = 5
"""Shutdown grace period, in seconds."""


@contextlib.contextmanager
def bound(config: GatewayConfig) -> Iterator[socket.socket]:
    """A socket on the configured port while the block runs. Raises `UserError` if the port cannot be taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        sock = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"cannot listen on `{config.host}:{config.port}`: {error.strerror}"
        raise UserError(message, hint="set `gateway.port=0` to take any free port") from error
    with sock:
        yield sock


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Files in PEM format."""

    file: Path
    key_file: Path | None
    """None: `file` holds the key."""


def certificate_of(config: GatewayConfig, *, root: Path) -> Certificate | None:
    """The configured certificate; None: there is none. Raises `UserError` if it cannot be used."""
    if config.certificate is None:
        return None
    key_file = None if config.certificate_key is None else root / config.certificate_key
    found = Certificate(file=root / config.certificate, key_file=key_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(found.file, found.key_file)
    except OSError as error:  # `ssl.SSLError` is one
        hint = "`gateway.certificate` and `gateway.certificate_key` are files in PEM format"
        raise UserError(f"cannot use the certificate `{found.file}`: {error.strerror or error}", hint=hint) from error
    return found


@asynccontextmanager
async def listening(app: Any, sock: socket.socket, *, certificate: Certificate | None = None) -> AsyncIterator[str]:
    """Serve an ASGI application while the block runs. Yields its base URL for programs of this machine."""
    settings = uvicorn.Config(
        app,
        log_level="error",  # a client that opens a WebSocket gets an error response instead
        lifespan="off",
        access_log=False,
        http=Connection,
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEPT_ALIVE_S,
        timeout_graceful_shutdown=ENDING_S,
        ssl_certfile=certificate and certificate.file,
        ssl_keyfile=certificate and certificate.key_file,
    )
    _open_more_files()
    # Connections inherit it. asyncio sets it only on sockets that name their protocol; head and body of an answer are
    # two writes, and without it the second waits 40 ms for the client's delayed acknowledgement of the first.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE, *before[1:])
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        yield _local_url(sock)
    finally:
        gc.set_threshold(*before)
        server.should_exit = True
        await task
        # calls that were cut short are still being recorded
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


def _local_url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host))  # a server at all addresses is also there
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _open_more_files() -> None:
    """A thousand streams need two thousand sockets, more than a process may have open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """Leaves signals to the rest of the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
