"""How does a log that others write stay small? Beyond a limit its end is kept beside it, under its name and `.1`, and
it begins anew.

Its writers have opened it for appending, so that they go on at its new end. What they write while its end is being
copied is lost.
"""

import asyncio
import os
from pathlib import Path

LOOK_S = 1.0
"""Between two looks: a program can write a gigabyte a second."""


async def keep_small(path: Path, *, limit: int) -> None:
    """Look at it until cancelled. `limit`: bytes."""
    while True:
        await asyncio.sleep(LOOK_S)
        if path.exists() and path.stat().st_size > limit:
            await asyncio.to_thread(begin_anew, path, keep=limit)


def begin_anew(path: Path, *, keep: int) -> None:
    """Keep the last `keep` bytes as `<path>.1`, in the place of what was kept before, and empty the log."""
    kept = path.with_name(path.name + ".1")
    with path.open("rb") as whole, kept.open("wb") as end:
        whole.seek(-keep, os.SEEK_END)
        end.write(whole.read(keep))  # and not what is added meanwhile, by a writer that may be as fast as we are
        os.truncate(path, 0)
