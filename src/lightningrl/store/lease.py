"""Until when does a lease hold? By a clock that nobody can set, as long as the machine has not been restarted.

All processes that share an SQLite file run on one machine, and its monotonic clock is the same for all of them. A lease
is written with that clock's reading and with the id of the machine's present boot. A wall clock that jumps changes
nothing then. A lease of an earlier boot is judged by the wall clock; so is every lease on a system that has no such id
(any but Linux), and where the file was moved to another machine. The monotonic clock stands still while the machine
sleeps, and so do the processes that hold leases.
"""

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PASSED = "status = 'running' AND CASE WHEN boot = :boot THEN lease_ticks <= :ticks ELSE lease_until <= :now END"
"""The condition for attempts whose lease has passed; a `Moment` has its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment on both clocks."""

    boot: bytes | None
    """Of the machine, since it was started; None where the system does not tell."""
    ticks: float
    """Seconds of the monotonic clock."""
    now: float
    """Unix seconds."""


def in_seconds(seconds: float) -> Moment:
    """The moment so many seconds from now."""
    return Moment(boot=boot_id(), ticks=time.monotonic() + seconds, now=time.time() + seconds)


@cache
def boot_id() -> bytes | None:
    try:
        return bytes.fromhex(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
        )
    except (OSError, ValueError):
        return None
