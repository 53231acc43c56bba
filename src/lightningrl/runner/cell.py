"""The first process of a sandbox. It hands out the sandbox's only door, starts the agent, and holds it to its limits.

    python -I -S cell.py DOOR HOST PORT PROCESSES MEMORY FILE COMMAND…

It listens on HOST:PORT, where the agent expects its model, and passes that socket on over the Unix socket DOOR: the
network of the sandbox is empty, but what its agent connects to there, a process outside accepts. MEMORY and FILE are
bytes. It is process 1: when it exits, the kernel kills all others in the sandbox. It runs as a file and imports only
the standard library, like the keeper.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

PR_SET_DUMPABLE = 4
"""From <linux/prctl.h>."""
POLL_S = 0.1
"""Time between two looks at the sandbox's processes."""
PAGE = os.sysconf("SC_PAGE_SIZE")
OVER = 125
"""Exit code of a sandbox that was ended because of a limit."""
NOT_STARTED = 127


def open_door(descriptor: int, host: str, port: int) -> None:
    """Listen, and give the listening socket away."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(fileno=descriptor) as out, socket.create_server((host, port), family=family) as door:
        socket.send_fds(out, [b"."], [door.fileno()])


def start(command: Sequence[str], *, processes: int, memory: int, file: int) -> int:
    """Start the agent under its limits. Returns its process id."""
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for limit, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, file),
            (resource.RLIMIT_DATA, memory),
            (resource.RLIMIT_NPROC, processes),
        ):
            hard = resource.getrlimit(limit)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"`{command[0]}` does not start in the sandbox: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def wait(process: int, *, processes: int, memory: int) -> int:
    """Returns the exit code of the agent, 128 + signal if it was killed; or `OVER`."""
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, POLL_S)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == process:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
        if excess := over(processes=processes, memory=memory):
            os.write(2, f"\nthe attempt was ended: {excess}\n".encode())
            return OVER


def over(*, processes: int, memory: int) -> str | None:
    """Which limit the sandbox's processes exceed together; None: none."""
    found = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(found) > processes:
        return f"more than `{processes}` processes"
    left = memory - segments()
    if sum(map(resident, found)) > left and sum(map(proportional, found)) > left:
        return f"more than `{memory / 2**30:g}` GiB of memory"
    return None


def resident(process: str) -> int:
    """Bytes of a process in memory. Pages that several processes share count for each of them."""
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:  # it has ended meanwhile
        return 0


def proportional(process: str) -> int:
    """Bytes of a process in memory, with its part of what it shares. This takes the kernel longer to find out."""
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:")), 0)
    except PermissionError:  # it has made itself opaque with PR_SET_DUMPABLE
        return resident(process)
    except OSError:
        return 0


def segments() -> int:
    """Bytes of System V shared memory, which lasts without a process. If attached, it counts for its processes, too."""
    try:
        with open("/proc/sysvipc/shm", "rb") as file:
            names = file.readline().split()
            return sum(int(line.split()[names.index(b"rss")]) for line in file)
    except OSError:  # a kernel without it
        return 0


def main(arguments: Sequence[str]) -> None:
    door, host, port, processes, memory, file, *command = arguments
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the agent cannot trace it, or write to its memory
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    open_door(int(door), host, int(port))
    process = start(command, processes=int(processes), memory=int(memory), file=int(file))
    os._exit(wait(process, processes=int(processes), memory=int(memory)))


if __name__ == "__main__":
    main(sys.argv[1:])
