"""Runs an agent that is a program: task on stdin, answer on stdout.

When the program's process has exited, its children may write for another half second. Then they are killed.
"""

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from lightningrl.errors import AgentError
from lightningrl.keeper import end_group
from lightningrl.runner.isolation import Isolation, Place, sandboxed
from lightningrl.runner.leftovers import ATTEMPT, end_leftovers
from lightningrl.runner.printed import Descriptor, Excerpt
from lightningrl.runner.wire import MAX_OUTPUT

OUTPUT = "LIGHTNINGRL_OUTPUT"
"""The environment variable that names the file a program may write its answer to."""
MAX_ENV = 120_000
"""Linux limits a single variable to 128 KiB (MAX_ARG_STRLEN); a larger task is on stdin only."""
MAX_STDERR = 4000
"""Characters of stderr that a record keeps: the last ones."""
SIGNALLED = 128
"""A sandbox ends with this exit code plus the signal if its program was ended by a signal, as shells do."""
LAST_WORDS_S = 0.5
"""After the program's exit, its children's output is read for this long."""
REASON = re.compile(r"^[\w.]*(?:[Ee]rror|Exception|panic)\b[^:\n]*: .+", re.MULTILINE)
"""The line that names the error, in Python, JavaScript, Java or Go. Node and Go print more lines after it."""


class _Program(asyncio.SubprocessProtocol):
    """Collects a program's stdout up to a limit, and the end of its stderr. Both go to the log as an excerpt."""

    def __init__(self, printed: Callable[[Descriptor, bytes], None]) -> None:
        self.excerpt = Excerpt(printed)
        self.stdout, self.stderr = bytearray(), b""
        self.exited, self.silent = asyncio.Event(), asyncio.Event()
        self._open = {1, 2}
        self._transport: asyncio.SubprocessTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.excerpt.add(2 if fd == 2 else 1, data)
        if fd == 2:
            self.stderr = (self.stderr + data)[-4 * MAX_STDERR :]  # a character has at most 4 bytes
        elif len(self.stdout) <= MAX_OUTPUT:
            self.stdout += data
        elif self._transport is not None:
            end_group(self._transport.get_pid())

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.silent.set()

    def process_exited(self) -> None:
        self.exited.set()


async def run_command(
    command: Sequence[str],
    task: bytes,
    env: Mapping[str, str],
    *,
    attempt_id: str,
    started: Callable[[int], None],
    printed: Callable[[Descriptor, bytes], None],
    isolation: Isolation | None = None,
) -> Any:
    """Returns the program's answer. Calls `started` with its process group, and `printed` with what it prints.

    `isolation`: run it in a sandbox.
    """
    with tempfile.TemporaryDirectory(prefix="lightningrl-", ignore_cleanup_errors=True) as folder:
        output = Path(folder) / "output"
        task_env = {"LIGHTNINGRL_TASK": task.decode()} if len(task) < MAX_ENV else {}
        own = {ATTEMPT: attempt_id, OUTPUT: str(output), **task_env}
        async with _place(command, {**os.environ, **env, **own}, isolation, output=output) as place:
            code, program = await _run(place, task, attempt_id=attempt_id, started=started, printed=printed)
        if isolation is not None and code > SIGNALLED:
            code = SIGNALLED - code
        if code != 0 and len(program.stdout) <= MAX_OUTPUT:
            raise AgentError(_failure(command[0], code, program.stderr.decode(errors="replace").strip()))
        return answer_of(bytes(program.stdout), output)


@asynccontextmanager
async def _place(
    command: Sequence[str], env: Mapping[str, str], isolation: Isolation | None, *, output: Path
) -> AsyncIterator[Place]:
    if isolation is None:
        yield Place(command=command, env=env)
        return
    gateway = env["OPENAI_BASE_URL"]
    async with sandboxed(command, env, isolation, output=output, gateway=gateway) as place:
        yield place


async def _run(
    place: Place,
    task: bytes,
    *,
    attempt_id: str,
    started: Callable[[int], None],
    printed: Callable[[Descriptor, bytes], None],
) -> tuple[int, _Program]:
    """Returns the exit code, negative for a signal, and the output."""
    spawning = asyncio.create_task(
        asyncio.get_running_loop().subprocess_exec(
            lambda: _Program(printed),
            *place.command,
            env=place.env,
            pass_fds=place.descriptors,
            start_new_session=True,
        )
    )
    try:
        transport, program = await asyncio.shield(spawning)
        started(transport.get_pid())
        stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        stdin.write(task)  # a program may ignore it
        stdin.close()
        await program.exited.wait()
        await _wait(program.silent)
    finally:
        transport, program = await spawning  # if cancelled while it starts, end it as well
        await end_leftovers(attempt_id, group=transport.get_pid())
        await program.exited.wait()
        await _wait(program.silent)  # output from before the kill
        transport.close()
        program.excerpt.close()
    code = transport.get_returncode()
    assert code is not None, "it has exited"
    return code, program


async def _wait(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            await event.wait()
    except TimeoutError:
        pass


def _failure(name: str, code: int, stderr: str) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    why = [*stderr.splitlines()[-1:], *REASON.findall(stderr)] or ["it wrote nothing to stderr"]
    return f"`{name}` {how}: {why[-1]}\n{stderr[-MAX_STDERR:]}"


def answer_of(printed: bytes, file: Path) -> Any:
    """The program's answer: the contents of `file`, or else the program's stdout.

        written to $LIGHTNINGRL_OUTPUT      that file: parsed if it is JSON, else its text
        printed JSON                        that, parsed
        printed logs, then `{…}` or `[…]`   the last line, parsed
        printed anything else               all of it, as text

    Raises `AgentError` if the answer is too long.
    """
    if len(printed) > MAX_OUTPUT:
        raise AgentError(
            f"the agent printed more than `{MAX_OUTPUT}` bytes",
            hint=f"log to stderr, or write the answer to the file named by `{OUTPUT}`",
        )
    if file.exists() and file.stat().st_size:
        with file.open("rb") as stream:
            written = stream.read(MAX_OUTPUT + 1)
        if len(written) > MAX_OUTPUT:
            raise AgentError(
                f"the agent wrote more than `{MAX_OUTPUT}` bytes to `{OUTPUT}`",
                hint="write it to another file and return its path",
            )
        return _parsed(written)
    last = printed.rstrip().rpartition(b"\n")[2].strip()
    logs_before = last[:1] in (b"{", b"[") and _is_json(last) and not _is_json(printed)
    return _parsed(last if logs_before else printed)


def _parsed(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.decode(errors="replace").strip()


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True
