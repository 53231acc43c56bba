"""Was a request meant for this server? Looks at its `Host` header.

A web page anywhere can let its own domain name resolve to this server's address (DNS rebinding). A browser then takes
the server for a part of that web site, and lets the page read answers. Such requests name that domain as their host.
"""

import re
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from ipaddress import ip_address

from lightningrl.dialects.base import Refused
from lightningrl.gateway.http import Scope

HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.%\w-]+)\]|(?P<name>[\w.*-]+))(?::\d*)?", re.ASCII)
KNOWN = 256
"""Headers that are remembered as good."""


class Hosts:
    """The names by which this server may be addressed, besides addresses and names without a dot.

    Nobody else's domain has a name without a dot, so `localhost` and names in a private network are always good.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names`: patterns; `*` stands for any characters."""
        self._patterns = [_plain(name) for name in (*names, "*.localhost", socket.gethostname())]
        self._known: set[bytes] = set()

    def check(self, scope: Scope) -> None:
        """Raises `Refused` (421) for a request to another host. Clients of HTTP/1.0 name none."""
        for name, value in scope["headers"]:
            if name == b"host" and value not in self._known:
                self._look(value)

    def _look(self, header: bytes) -> None:
        host = header.decode("latin-1")
        if not self.admits(host):
            hint = "add the name to `gateway.hosts`, or set `gateway.public_url`"
            raise Refused(421, f"this server is not `{host:.80}`", code="unknown_host", hint=hint, final=True)
        if len(self._known) < KNOWN:
            self._known.add(header)

    def admits(self, host: str) -> bool:
        """Whether the value of a `Host` header is good. An empty one names no host."""
        found = HOST.fullmatch(host.strip().lower())
        if found is None:
            return not host.strip()
        name = found["address"] or _plain(found["name"])
        return _is_address(name) or "." not in name or any(fnmatchcase(name, known) for known in self._patterns)


def _plain(name: str) -> str:
    """In lower case, and without the dot of the root."""
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
