"""`lightningrl doctor`: is everything here that a run needs?"""

import importlib.util
import os
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

MIN_FREE_BYTES = 1 << 30
EXTRAS = {"torch": "train", "transformers": "train", "matplotlib": "train", "langgraph": "recipes", "langchain_openai": "recipes"}
"""Module → the extra that brings it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    found: str
    hint: str = ""
    """What to do about it; empty when all is well."""


def checks() -> Iterator[Check]:
    """Look at everything; nothing is changed."""
    ok = sys.version_info >= (3, 11)
    yield Check(name="python", ok=ok, found=sys.version.split()[0], hint="" if ok else "install Python 3.11 or newer")
    for module, extra in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        found = version(module.replace("_", "-")) if there else "missing"
        yield Check(name=module, ok=there, found=found, hint="" if there else f'pip install "lightningrl[{extra}]"')
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    yield Check(name="cores", ok=cores >= 2, found=str(cores), hint="" if cores >= 2 else "set `agent.workers=1 trainer.threads=1`")
    free = shutil.disk_usage(".").free
    yield Check(name="disk", ok=free > MIN_FREE_BYTES, found=f"{free / (1 << 30):.0f} GiB free", hint="" if free > MIN_FREE_BYTES else "make room")
    ok = sqlite3.sqlite_version_info >= (3, 24)  # ON CONFLICT
    yield Check(name="sqlite", ok=ok, found=sqlite3.sqlite_version, hint="" if ok else "install SQLite 3.24 or newer")
    try:
        socket.create_server(("127.0.0.1", 0)).close()
        yield Check(name="loopback", ok=True, found="can listen")
    except OSError as error:
        yield Check(name="loopback", ok=False, found=str(error), hint="allow this process to listen on 127.0.0.1")
