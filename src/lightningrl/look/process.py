"""The process of a run: `process.json` in its folder names it while it runs. A process that was killed leaves it there.

Another process may get the same number later, so the file also has the time at which the process started.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "process.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The process that trains a run."""

    pid: int
    started: int | None
    """Its start, in clock ticks since the start of the system; None: the system does not tell."""
    gateway: str
    """URL of its gateway."""
    host: str
    """Name of its machine."""

    @property
    def alive(self) -> bool:
        """Whether it runs. A process of another machine counts as alive until its run ends."""
        return self.host != socket.gethostname() or _started(self.pid) == (True, self.started)


@contextmanager
def named(folder: Path, *, gateway: str) -> Iterator[None]:
    """Name this process in the folder while the block runs."""
    pid = os.getpid()
    process = Process(pid=pid, started=_started(pid)[1], gateway=gateway, host=socket.gethostname())
    draft = folder / f"{FILE}.draft"
    draft.write_text(json.dumps(asdict(process)) + "\n", encoding="utf-8")
    draft.replace(folder / FILE)
    try:
        yield
    finally:
        (folder / FILE).unlink(missing_ok=True)


def process_of(folder: Path) -> Process | None:
    """The process that trains the run in this folder; None: none does."""
    try:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    process = Process(**told)
    return process if process.alive else None


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
