"""Runs an agent that is a program: the task on its stdin, the answer on its stdout, its group ended with it whatever happens."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from lightningrl.errors import AgentError
from lightningrl.runner.wire import MAX_OUTPUT

MAX_ENV = 120_000
"""Linux refuses a program any single variable of 128 KiB or more (MAX_ARG_STRLEN); a larger task is on stdin alone."""
MAX_STDERR = 4000
"""Characters of stderr that a record keeps: the last."""
REASON = re.compile(r"^[\w.]*(?:[Ee]rror|Exception|panic)\b[^:\n]*: .+", re.MULTILINE)
"""A line that says what went wrong, in Python, JavaScript, Java or Go. Some print more after it: node its version, Go where it was."""


async def run_command(command: Sequence[str], task: bytes, env: Mapping[str, str], *, started: Callable[[int], None]) -> Any:
    """The program's answer: parsed if it is JSON, else its text. `started` is told its process group."""
    task_env = {"LIGHTNINGRL_TASK": task.decode()} if len(task) < MAX_ENV else {}
    pipe = asyncio.subprocess.PIPE
    spawning = asyncio.create_task(
        asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **env, **task_env}, start_new_session=True)
    )
    try:
        process = await asyncio.shield(spawning)
        started(process.pid)
        stdin, out, err = _streams(process)
        stdout, stderr, _ = await asyncio.gather(_head(out, group=process.pid), _tail(err), _feed(stdin, task))
        code = await process.wait()
    finally:
        process = await spawning  # whoever gives up while it is being started must wait for its group, to end it
        end_group(process.pid)
        _, out, err = _streams(process)
        await asyncio.gather(_tail(out), _tail(err))  # a pipe that still holds data would keep `wait` waiting
        await process.wait()
    if len(stdout) > MAX_OUTPUT:
        raise AgentError(f"the agent printed more than `{MAX_OUTPUT}` bytes", hint="stdout is for the answer; log to stderr")
    if code != 0:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        text = stderr.decode(errors="replace").strip()
        why = [*text.splitlines()[-1:], *REASON.findall(text)] or ["it wrote nothing to stderr"]
        raise AgentError(f"`{command[0]}` {how}: {why[-1]}\n{text[-MAX_STDERR:]}")
    return _parsed(stdout)


def end_group(group: int) -> None:
    """SIGKILL to a process group that may have ended already."""
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: what macOS says of a group of zombies
        os.killpg(group, signal.SIGKILL)


def _streams(process: asyncio.subprocess.Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader]:
    assert process.stdin and process.stdout and process.stderr
    return process.stdin, process.stdout, process.stderr


async def _head(stream: asyncio.StreamReader, *, group: int) -> bytes:
    """All of the stream, unless it is too much: then a bit more than is allowed, and the group is ended."""
    kept = b""
    while part := await stream.read(2**20):
        if len(kept) <= MAX_OUTPUT:
            kept += part
        else:
            end_group(group)
    return kept


async def _tail(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while part := await stream.read(2**16):
        kept = (kept + part)[-4 * MAX_STDERR :]  # a character has at most 4 bytes
    return kept


async def _feed(stream: asyncio.StreamWriter, task: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its input
        stream.write(task)
        await stream.drain()
    stream.close()


def _parsed(stdout: bytes) -> Any:
    try:
        return msgspec.json.decode(stdout)
    except msgspec.DecodeError:
        return stdout.decode(errors="replace").strip()
