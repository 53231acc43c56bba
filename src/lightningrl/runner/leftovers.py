"""Kills the processes that a program leaves behind when its attempt ends, and no other attempt's.

First the program's process group. Then, on Linux, processes that have left the group: orphans below the worker's keeper
whose environment names the attempt, and their descendants. A process that has also wiped its environment is killed when
its worker ends. On other systems only the group is killed.
"""

import asyncio
import os
import sys
from contextlib import suppress

from lightningrl import keeper

ATTEMPT = "LIGHTNINGRL_ATTEMPT"
"""The environment variable with the attempt's id. A program's child processes inherit it."""
ENDING_S = 0.3
"""Timeout for a killed group to end, and then for the attempt's orphans."""
POLL_S = 0.005


async def end_leftovers(attempt_id: str, *, group: int) -> None:
    """Kill everything that a program has started, and the program itself, the leader of `group`."""
    keeper.end_group(group)
    if sys.platform != "linux":
        return
    with suppress(TimeoutError):  # stuck in the kernel, e.g. on a lost disk; the keeper tries again
        async with asyncio.timeout(ENDING_S):
            await _ended(group)  # only then are processes that left the group orphans
    with suppress(TimeoutError):
        async with asyncio.timeout(ENDING_S):
            while found := await asyncio.to_thread(_orphans, attempt_id, group):
                for process in found:
                    keeper.kill(process)
                await asyncio.sleep(POLL_S)


async def _ended(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # another user's process cannot be signalled
        while True:
            os.killpg(group, 0)
            await asyncio.sleep(POLL_S)


def _orphans(attempt_id: str, session: int) -> list[int]:
    """Processes of this attempt that have lost their parents, and their descendants."""
    parent_of = keeper.parents()
    orphans = [process for process, parent in parent_of.items() if parent == os.getppid() and process != os.getpid()]
    return keeper.descendants([process for process in orphans if _is_of(process, attempt_id, session)], parent_of)


def _is_of(process: int, attempt_id: str, session: int) -> bool:
    try:
        if os.getsid(process) == session:
            return True
        with open(f"/proc/{process}/environ", "rb") as file:
            return f"{ATTEMPT}={attempt_id}".encode() in file.read().split(b"\0")
    except OSError:  # it has ended meanwhile, or runs as another user
        return False
