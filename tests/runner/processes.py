"""Questions about processes, for the runner's tests."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path


async def written(path: Path, *, timeout_s: float = 60.0) -> int:
    """The process id that an agent writes to a file."""
    async with asyncio.timeout(timeout_s):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.01)
    return int(path.read_text())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie only waits for its parent


async def gone(pids: Sequence[int], *, timeout_s: float = 6.0) -> bool:
    until = time.monotonic() + timeout_s
    while any(map(alive, pids)) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    return not any(map(alive, pids))
