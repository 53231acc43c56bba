"""Runs a program as a shell would: with our stdin, stdout and stderr, in a process group of its own that is ended with
it.

At a terminal the group is in the foreground, so that Ctrl-C and Ctrl-Z reach the program as ever. Signals that we get
are handed on.
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
from lightningrl.runner.keeper import end_group

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_S = 10.0
"""What a program that was told to end gets to do so."""
LEFTOVERS_S = 1.0
"""The same for what it has left in its group."""


async def run_foreground(command: Sequence[str], env: Mapping[str, str]) -> int:
    """The exit code, as a shell gives it: 128 + the number of the signal that ended the program."""
    with _terminal() as give, _handing_on() as to:
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
        raise UserError(f"cannot start `{command[0]}`: {error.strerror}", hint="can it be executed?") from error


def _wait(process: subprocess.Popen[bytes], give: Callable[[int], None]) -> int:
    """Wait for the end; meanwhile, when the program is suspended, so are we: the shell shall get the terminal."""
    while True:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        give(os.getpgrp())
        os.kill(0, signal.SIGSTOP)  # here we are until `fg`
        give(process.pid)


def _end_leftovers(group: int) -> None:
    """What the program has started and left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + LEFTOVERS_S
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.02)
    end_group(group)


@contextmanager
def _handing_on() -> Iterator[Callable[[int], None]]:
    """Signals to us reach the process group that is named, also those that come before it is. A program that is started
    in here begins with each of them as it is by default, even where a shell has us ignore them.
    """
    loop = asyncio.get_running_loop()
    groups: list[int] = []
    early: list[signal.Signals] = []
    timers: list[asyncio.TimerHandle] = []

    def hand_on(number: signal.Signals) -> None:
        if not groups:
            early.append(number)
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(groups[0], number)
        if number is not signal.SIGINT:  # what a program does on Ctrl-C is its own affair
            timers.append(loop.call_later(GRACE_S, end_group, groups[0]))

    def to(group: int) -> None:
        groups.append(group)
        for number in early:
            hand_on(number)

    before = {number: signal.getsignal(number) for number in HANDED_ON}
    for number in HANDED_ON:
        loop.add_signal_handler(number, hand_on, number)
    try:
        yield to
    finally:
        for number in HANDED_ON:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
        for timer in timers:
            timer.cancel()


@contextmanager
def _terminal() -> Iterator[Callable[[int], None]]:
    """Puts a process group into the foreground of our terminal, and us again at the end. Without a terminal it only
    wakes the group.
    """
    ours = os.getpgrp()
    try:
        descriptor = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield lambda group: None
        return
    holders = {ours, 0}
    """From whom we may take it: ourselves, the program, and groups that have ended. If it is somebody else's, we run in
    the background.
    """

    def give(group: int) -> None:
        holders.add(group)
        blocked = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTTOU}
        )  # or we would be stopped: it may be in the background who gives
        try:
            if os.tcgetpgrp(descriptor) in holders:
                os.tcsetpgrp(descriptor, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if group != ours:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGCONT)  # it may have asked for the terminal before it had it

    try:
        yield give
    finally:
        with suppress(OSError):  # the terminal may be gone
            give(ours)
        os.close(descriptor)
