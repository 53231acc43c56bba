"""Keeps a log small that other processes write: beyond a limit its end moves to `<name>.1`, and the log is emptied.

The writers have opened it in append mode, so they continue at the new end. Output written during the copy is lost.
"""

import asyncio
import os
from pathlib import Path

LOOK_S = 1.0
"""Interval between checks. A program can write a gigabyte per second."""


async def keep_small(path: Path, *, limit: int) -> None:
    """Check the log's size until cancelled. `limit`: bytes."""
    while True:
        await asyncio.sleep(LOOK_S)
        if path.exists() and path.stat().st_size > limit:
            await asyncio.to_thread(begin_anew, path, keep=limit)


def begin_anew(path: Path, *, keep: int) -> None:
    """Write the last `keep` bytes to `<path>.1`, replacing the previous ones, and empty the log."""
    kept = path.with_name(path.name + ".1")
    with path.open("rb") as whole, kept.open("wb") as end:
        whole.seek(-keep, os.SEEK_END)
        end.write(whole.read(keep))  # no more: a fast writer may be appending
        os.truncate(path, 0)
