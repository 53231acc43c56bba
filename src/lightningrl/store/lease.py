"""When does a lease pass? The monotonic clock decides, as long as the machine has not been restarted.

All processes that share an SQLite file run on one machine, and share its monotonic clock. A lease stores the reading of
that clock, and the id of the machine's boot. So a jump of the wall clock changes nothing. The wall clock only decides
for leases of an earlier boot, on systems without boot ids (all but Linux), and if the file moved to another machine.
While the machine sleeps, the monotonic clock stands still, and so do the workers that hold leases.
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lightningrl.store.connection import Connection

EXTEND = "UPDATE attempts SET lease_until = ?, boot = ?, lease_ticks = ?"

_RUNNING = "SELECT id FROM whole_attempts WHERE status = 'running' AND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment on both clocks."""

    boot: bytes | None
    """Id of the machine's boot; None if the system has none."""
    ticks: float
    """Monotonic clock, in seconds."""
    now: float
    """Unix seconds."""


def in_seconds(seconds: float) -> Moment:
    """The moment `seconds` from now."""
    return Moment(boot=boot_id(), ticks=time.monotonic() + seconds, now=time.time() + seconds)


def passed(connection: Connection, at: Moment) -> list[str]:
    """Ids of the running attempts whose lease has passed. Looks only at those in the index, and at other boots."""
    found: list[tuple[str]] = []
    if at.boot is not None:
        found += connection.execute(f"{_RUNNING} boot = ? AND lease_ticks <= ?", (at.boot, at.ticks))
        found += connection.execute(f"{_RUNNING} boot < ? AND lease_until <= ?", (at.boot, at.now))
        found += connection.execute(f"{_RUNNING} boot > ? AND lease_until <= ?", (at.boot, at.now))
    found += connection.execute(f"{_RUNNING} boot IS NULL AND lease_until <= ?", (at.now,))
    return [attempt_id for (attempt_id,) in found]


@cache
def boot_id() -> bytes | None:
    """The id of the machine's present boot; None if the system has none."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return None
