"""Where do workers on other machines reach a run, and what do their users type there?"""

import ipaddress
import json
import shlex
import socket

from lightningrl.config import Config, GatewayConfig
from lightningrl.errors import UserError

KEY_PLACE = "~/worker.key"
"""Where the printed command expects the worker key: not in the recipe's folder, which agents can read."""


def listen_overrides(listen: str | None) -> list[str]:
    """`0.0.0.0:8100` as overrides of the settings; none without it. Raises `UserError`."""
    if listen is None:
        return []
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        hint = "write it as `0.0.0.0:8100`; a resumed run needs the same port again, so that its workers find it"
        raise UserError(f"`--listen {listen}` names no host and port", hint=hint)
    return [f"gateway.host={json.dumps(host.strip('[]') or '0.0.0.0')}", f"gateway.port={port}"]


def worker_command(config: Config, *, port: int) -> str:
    """The line to type on another machine, in a copy of the recipe's folder, with the key at `KEY_PLACE`."""
    labels = [part for label in config.agent.labels for part in ("--label", label)]
    command = shlex.join(["lightningrl", "worker", server_url(config.gateway, port=port)])
    return " ".join([command, "--key-file", KEY_PLACE, *map(shlex.quote, labels)])


def server_url(config: GatewayConfig, *, port: int) -> str:
    """The address of the run for other machines."""
    if config.public_url:
        return config.public_url
    scheme = "https" if config.certificate else "http"
    host = config.host
    if _is_unspecified(host):
        host = _own_address()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _own_address() -> str:
    """The address of the interface that leads out; this sends nothing. The host's name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737)
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
