"""Another host on this machine: a network namespace, joined to this one by a virtual cable."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

OURS, THEIRS = "10.231.77.1", "10.231.77.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a worker runs."""

    name: str
    inside: tuple[str, ...]
    """Words before a command that is to run there."""
    address: str
    """Of this machine, as seen from there."""


@contextmanager
def other_host() -> Iterator[Host]:
    """Needs root and `ip`; without them, the other host is this one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield Host(name="this host, over the loopback", inside=(), address="127.0.0.1")
        return
    place = f"lrl{os.getpid()}"
    here, there = f"lrla{os.getpid()}"[:15], f"lrlb{os.getpid()}"[:15]
    _ip("netns", "add", place)
    try:
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        _ip("link", "set", there, "netns", place)
        _ip("addr", "add", f"{OURS}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", place, "addr", "add", f"{THEIRS}/30", "dev", there)
        _ip("-n", place, "link", "set", there, "up")
        _ip("-n", place, "link", "set", "lo", "up")
        inside = ("ip", "netns", "exec", place)
        yield Host(name="a network namespace of its own", inside=inside, address=OURS)
    finally:
        _ip("netns", "del", place)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
