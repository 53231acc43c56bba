"""The process of a run: `process.json` in its folder names it while it runs. A process that was killed leaves it there.

Another process may get the same number later, so the file also has the time at which the process started.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lightningrl.store.place import FILE as STORE

FILE, RESULT = "process.json", "result.json"
WRITTEN = ("metrics.jsonl", STORE, f"{STORE}-wal", FILE)
"""Files that a run writes while it goes on."""
QUIET_S = 1800.0
"""A run of another machine that has written nothing for so many seconds counts as stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The process that trains a run."""

    pid: int
    started: int | None
    """Its start, in clock ticks since the start of the system; None: the system does not tell."""
    host: str
    """Name of its machine."""


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """Name this process in the folder while the block runs."""
    pid = os.getpid()
    process = Process(pid=pid, started=_started(pid)[1], host=socket.gethostname())
    draft = folder / f"{FILE}.draft"
    draft.write_text(json.dumps(asdict(process)) + "\n", encoding="utf-8")
    draft.replace(folder / FILE)
    try:
        yield
    finally:
        (folder / FILE).unlink(missing_ok=True)


def process_of(folder: Path) -> Process | None:
    """The process that trains the run in this folder; None: none does, or the file that names it is damaged."""
    try:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        process = Process(pid=told["pid"], started=told["started"], host=told["host"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    here = process.host == socket.gethostname()
    return process if (_started(process.pid) == (True, process.started) if here else _writes(folder)) else None


def _writes(folder: Path) -> bool:
    """Whether the run seems to go on: it has no result since its start, and has written something lately."""
    times = {name: _changed_at(folder / name) for name in (*WRITTEN, RESULT)}
    return times[RESULT] <= times[FILE] and max(times.values()) > time.time() - QUIET_S


def _changed_at(file: Path) -> float:
    """Unix seconds; 0: it is missing or empty. SQLite makes an empty log for those who read."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return 0.0
    return stat.st_mtime if stat.st_size else 0.0


def _started(pid: int) -> tuple[bool, int | None]:
    """(whether the process exists, its start in ticks). A zombie does not count."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] != b"Z", int(fields[19])
    if Path("/proc/self/stat").exists():
        return False, None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False, None
    except PermissionError:
        pass
    return True, None
