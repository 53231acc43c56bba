"""What has a program left running when its attempt ends, and how is it ended without harm to other attempts?

First its process group. Then, on Linux, whatever has left that group: orphans below the worker's keeper whose
environment names the attempt, and everything below them. A process that has also wiped its environment goes when its
worker goes. Elsewhere only the group can be ended.
"""

import asyncio
import os
import sys
from contextlib import suppress

from lightningrl.runner import keeper

ATTEMPT = "LIGHTNINGRL_ATTEMPT"
"""The environment variable of a program that holds the id of its attempt; the processes that it starts inherit it."""
ENDING_S = 0.3
"""What a group that was killed may take to end, and then the orphans of the attempt."""
POLL_S = 0.005


async def end_leftovers(attempt_id: str, *, group: int) -> None:
    """End what a program has started. The program, the leader of `group`, has ended or is ended as well."""
    keeper.end_group(group)
    if sys.platform != "linux":
        return
    with suppress(TimeoutError):  # it waits for a disk that has gone; its keeper comes back to it
        async with asyncio.timeout(ENDING_S):
            await _ended(group)  # whoever has left the group is an orphan only then
    with suppress(TimeoutError):
        async with asyncio.timeout(ENDING_S):
            while found := await asyncio.to_thread(_orphans, attempt_id, group):
                for process in found:
                    keeper.kill(process)
                await asyncio.sleep(POLL_S)


async def _ended(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # of another user, who cannot be told to end
        while True:
            os.killpg(group, 0)
            await asyncio.sleep(POLL_S)


def _orphans(attempt_id: str, session: int) -> list[int]:
    """Processes of this attempt that have lost their parents, and all that is below them."""
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
