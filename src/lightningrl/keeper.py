"""The parent process of a worker or a server. It cleans up after it: Linux makes it the parent of every orphan below.

    python -I -S keeper.py FD COMMAND…      run COMMAND in its own session; exit as it exits

The keeper exits when its command has exited, when it gets SIGTERM, or when the other end of the socket FD is closed.
Before that it kills all of its descendants, including those in sessions of their own. It runs as a file and imports
only the standard library: it starts in milliseconds, takes little memory, and no agent's code can break it.

On other systems orphans go to init. There the keeper kills the command and its process group; processes that have left
the group survive.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From <linux/prctl.h>."""
EXIT_S = 3.0
"""Grace period for a command after the socket's other end was closed."""
END_S = 5.0
"""Timeout for killed processes to end. Some hang in the kernel, e.g. on a lost disk."""
POLL_S = 0.005


class Keeper:
    """Starts a command, waits for it, and kills what it leaves behind."""

    def __init__(self) -> None:
        self._told_to_end = False
        self._wakes, wakened = os.pipe()
        os.set_blocking(wakened, False)
        signal.set_wakeup_fd(wakened)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self, command: Sequence[str], descriptor: int) -> int:
        """Returns the command's wait status."""
        process = _start(command)
        status = self._wait(process, descriptor)
        end_group(process)
        _end_all()
        return status

    def _wait(self, process: int, descriptor: int) -> int:
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        poll.register(descriptor, 0)  # report only that it was closed
        deadline: float | None = None
        while True:
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            for ready, _ in poll.poll(None if wait_s is None else wait_s * 1000):
                if ready == descriptor:
                    poll.unregister(descriptor)
                    deadline = time.monotonic() + EXIT_S
                else:
                    os.read(self._wakes, 4096)
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == process:
                    return reaped[1]
            if self._told_to_end or (deadline is not None and time.monotonic() >= deadline):
                os.kill(process, signal.SIGKILL)
                deadline = None

    def _end(self, *_: object) -> None:
        self._told_to_end = True


def parents() -> dict[int, int]:
    """Process id → its parent's, of all living processes except zombies. Empty on systems other than Linux."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it has ended meanwhile
                continue
            if state != b"Z":
                found[int(name)] = int(parent)
    return found


def descendants(roots: Sequence[int], parent_of: Mapping[int, int]) -> list[int]:
    """The roots and all of their descendants."""
    children: dict[int, list[int]] = {}
    for process, parent in parent_of.items():
        children.setdefault(parent, []).append(process)
    found = list(roots)
    for process in found:  # the list grows during the loop
        found += children.get(process, ())
    return found


def kill(process: int) -> None:
    """Send SIGKILL to a process that may have ended, or may belong to another user by now."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def end_group(group: int) -> None:
    """Send SIGKILL to a process group that may have ended."""
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a group of zombies
        os.killpg(group, signal.SIGKILL)


def _end_all() -> None:
    """Kill our children until none is left. The children of a killed process become ours."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for process, parent in parents().items():
            if parent == os.getpid():
                kill(process)
        time.sleep(POLL_S)


def _start(command: Sequence[str]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()  # signals to its group do not reach the keeper
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execv(command[0], tuple(command))
    finally:
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _end_like(status: int) -> None:
    """Exit with the command's exit code, or by the signal that killed it."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump of the keeper
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    _end_like(Keeper().run(sys.argv[2:], int(sys.argv[1])))
