"""Runs a program as a shell would: with our stdin, stdout and stderr, in its own process group.

At a terminal, the group runs in the foreground, so Ctrl-C and Ctrl-Z reach the program. Signals to us are forwarded.
When the program exits, its process group is ended.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from lightningrl.errors import UserError
from lightningrl.keeper import end_group

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_S = 10.0
"""Grace period for a program after SIGTERM, SIGHUP or SIGQUIT."""
LEFTOVERS_S = 1.0
"""Grace period for the processes that it leaves in its group."""


async def run_foreground(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Returns the exit code as a shell would: 128 + the signal's number if a signal killed the program."""
    with _terminal() as give, _forwarding() as to:
        process = _start(command, env)
        to(process.pid)
        give(process.pid)
        try:
            code = await asyncio.to_thread(_wait, process, give)
        finally:
            await asyncio.to_thread(_end_leftovers, process.pid)
    return 128 - code if code < 0 else code


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    if shutil.which(command[0], path=env.get("PATH")) is None:
        raise UserError(
            f"there is no program `{command[0]}`", hint="everything after `--` is the command and its arguments"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return subprocess.Popen(command, env=dict(env), process_group=0)
    except OSError as error:
        raise UserError(f"cannot start `{command[0]}`: {error.strerror}", hint="is it executable?") from error


def _wait(process: subprocess.Popen[bytes], give: Callable[[int], None]) -> int:
    """Wait for the exit. When the program is suspended, suspend ourselves, so that the shell gets the terminal."""
    while True:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        give(os.getpgrp())
        os.kill(0, signal.SIGSTOP)  # until `fg`
        give(process.pid)


def _end_leftovers(group: int) -> None:
    """End the processes that the program leaves behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + LEFTOVERS_S
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
    end_group(group)


@contextmanager
def _forwarding() -> Iterator[Callable[[int], None]]:
    """Forward our signals to a process group; signals that come before the group is set are kept for it.

    A program that starts in this block has the default action for each signal, even if we were started to ignore some.
    """
    loop = asyncio.get_running_loop()
    groups: list[int] = []
    early: list[signal.Signals] = []
    timers: list[asyncio.TimerHandle] = []

    def forward(number: signal.Signals) -> None:
        if not groups:
            early.append(number)
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(groups[0], number)
        if number is not signal.SIGINT:  # a program may survive Ctrl-C
            timers.append(loop.call_later(GRACE_S, end_group, groups[0]))

    def to(group: int) -> None:
        groups.append(group)
        for number in early:
            forward(number)

    before = {number: signal.getsignal(number) for number in FORWARDED}
    for number in FORWARDED:
        loop.add_signal_handler(number, forward, number)
    try:
        yield to
    finally:
        for number in FORWARDED:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
        for timer in timers:
            timer.cancel()


@contextmanager
def _terminal() -> Iterator[Callable[[int], None]]:
    """Yields a function that moves a process group into the terminal's foreground. At the end we move back.

    Without a terminal, the function does nothing.
    """
    ours = os.getpgrp()
    try:
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield lambda group: None
        return
    holders = {ours, 0}
    """Groups that we may take the terminal from: ours, the program's, and ended ones. Else we run in the background."""

    def give(group: int) -> None:
        holders.add(group)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})  # it would stop us in the background
        try:
            if os.tcgetpgrp(descriptor) in holders:
                os.tcsetpgrp(descriptor, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if group != ours:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGCONT)  # it may have stopped, waiting for the terminal

    try:
        yield give
    finally:
        with suppress(OSError):  # the terminal may be gone
            give(ours)
        os.close(descriptor)
