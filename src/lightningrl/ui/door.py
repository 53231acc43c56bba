"""The socket of the page. `train` takes one, too, so this module imports nothing that costs a run."""

import socket

from lightningrl.errors import UserError

PORTS = range(8790, 8800)
"""The ports that are tried, in this order, before any free one."""
LOOPBACK = "127.0.0.1"
BACKLOG = 128
"""Connections that wait to be accepted."""


def take(host: str = LOOPBACK, port: int | None = None) -> socket.socket:
    """A listening socket. `port`: None: the first free one of `PORTS`, or any. Raises `UserError`."""
    wanted = (*PORTS, 0) if port is None else (port,)
    for place, number in enumerate(wanted, start=1):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, number), family=family, backlog=BACKLOG)
        except OSError as error:
            if place == len(wanted):
                hint = "leave out `--port` to take a free one, and let `--host` be an address of this machine"
                raise UserError(f"cannot serve the page at `{host}:{number}`: {error.strerror}", hint=hint) from error
    raise AssertionError


def address(sock: socket.socket, *, key: str | None = None) -> str:
    """What to open in a browser."""
    host, port = sock.getsockname()[:2]
    host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/" + (f"?key={key}" if key else "")
