"""A worker process, seen from its parent: jobs go in, and results come out, even if the process dies."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from lightningrl import keeper
from lightningrl.errors import AgentError, GraderError
from lightningrl.keeper import end_group
from lightningrl.runner import wire
from lightningrl.runner.watchdog import read_note

DRAIN_S = 1.0
"""Timeout for reading what an ended worker has left in its socket."""
EXIT_S = 3.0
"""Grace period for a worker to exit."""


class WorkerProcess:
    """A worker that has loaded the agent. It calls `changed` whenever a job or the worker itself has ended."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        notes: BinaryIO,
    ) -> None:
        self.pid = process.pid
        self.retired = False
        """It takes no more jobs: it is dead, or runs an agent that cannot be stopped."""
        self.changed: Callable[[WorkerProcess], None] | None = None
        self._process = process
        self._reader = reader
        self._writer = writer
        self._notes = notes
        self._killed_for: str | None = None
        self._jobs: dict[str, asyncio.Future[wire.Done]] = {}
        self._groups: dict[str, int] = {}
        self._gone = False
        self._watching: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Number of jobs that run in it."""
        return len(self._jobs)

    @property
    def jobs(self) -> Set[str]:
        """Ids of the jobs that run in it."""
        return self._jobs.keys()

    @property
    def blocked_by(self) -> str | None:
        """The job that blocks the event loop now; "" if it is not known which, None if the loop is not blocked."""
        return None if self._notes.closed else read_note(self._notes.fileno())

    @classmethod
    async def spawn(
        cls, setup: wire.Setup, *, env: Mapping[str, str], log: Path | None, timeout_s: float
    ) -> "WorkerProcess":
        """Start a process and wait until it has loaded the agent. Raises `AgentError` or `GraderError` if it cannot."""
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as opened:
            opened.callback(ours.close)
            notes = opened.enter_context(tempfile.TemporaryFile(buffering=0))
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=wire.MAX_LINE)
            opened.callback(writer.close)
            process = await _launch(theirs, notes, env=env, root=setup.root, log=log)
            opened.pop_all()  # they stay open as long as the worker lives
        worker = cls(process, reader, writer, notes)
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(wire.line(setup))
                line = await reader.readline()
        except ConnectionError:
            line = b""  # it died before it had read the setup
        except TimeoutError as error:
            await worker.close()
            name = setup.entry or "command"
            hint = "does its module do something slow, or wait, when it is imported?"
            raise AgentError(f"agent `{name}` was not loaded within {timeout_s:g} s", hint=hint) from error
        except BaseException:
            await worker.close()
            raise
        match wire.from_worker.decode(line) if line else None:
            case wire.Ready():
                worker._watching = asyncio.create_task(worker._watch())
                return worker
            case wire.Refused(owner=owner, message=message, hint=hint):
                await worker.close()
                raise (AgentError if owner == "agent" else GraderError)(message, hint=hint)
            case _:
                await worker.close()
                raise AgentError(
                    f"the process died while it loaded the agent ({worker._ending()})",
                    hint=f"see `{log}`" if log else None,
                )

    def submit(self, job: wire.Job) -> asyncio.Future[wire.Done]:
        """The job's future result. Cancelling the future does not end the job; `cancel` does."""
        future: asyncio.Future[wire.Done] = asyncio.get_running_loop().create_future()
        self._jobs[job.id] = future
        self._writer.write(wire.line(job))
        return future

    def cancel(self, job_id: str) -> None:
        if job_id in self._jobs:
            self._writer.write(wire.line(wire.Cancel(id=job_id)))

    def abandon(self, job_id: str) -> None:
        """Stop waiting for a job that may still run."""
        self.cancel(job_id)
        self._jobs.pop(job_id, None)

    def kill(self, *, reason: str | None = None) -> None:
        """Have the keeper kill the worker and everything started in it. Its jobs are lost, for `reason`.

        Without a reason, any of the jobs may be to blame: each becomes a suspect.
        """
        self.retired = True
        self._killed_for = self._killed_for or reason
        if not self._gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        for group in self._groups.values():
            end_group(group)
        self._groups.clear()

    async def idle(self, *, timeout_s: float) -> None:
        """Wait until all of its jobs have ended, or for `timeout_s`."""
        if self._jobs:
            await asyncio.wait(self._jobs.values(), timeout=timeout_s)

    async def close(self) -> None:
        """Tell the worker to end its commands and itself; returns when it is gone."""
        self.retired = True
        self.changed = None
        if not self._writer.is_closing():
            self._writer.write_eof()  # its messages about commands it has just started are still read
        try:
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.kill()
        await self._ended()
        self._gone = True
        if self._watching is not None:
            await asyncio.shield(self._watching)  # if `close` is cancelled, it may be called again
        self._writer.close()
        self._notes.close()

    async def _watch(self) -> None:
        """Read until the worker has ended; then all of its remaining jobs are lost."""
        reading = asyncio.create_task(self._read())
        ending = asyncio.create_task(self._process.wait())
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await asyncio.wait({reading}, timeout=DRAIN_S)
        reading.cancel()
        self.kill()
        await self._ended()
        await ending
        self._gone = True
        self._writer.close()
        self._notes.close()
        error = self._killed_for or f"the worker process died ({self._ending()})"
        for job_id in list(self._jobs):
            self._end(wire.Done(id=job_id, status="lost", error=error, suspect=self._killed_for is None))
        self._change()

    async def _ended(self) -> None:
        """Wait for the keeper's exit, and kill it if it takes longer than it should, e.g. because it was stopped."""
        try:
            async with asyncio.timeout(keeper.END_S + EXIT_S):
                await self._process.wait()
        except TimeoutError:
            end_group(self.pid)
            await self._process.wait()

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                match wire.from_worker.decode(line):
                    case wire.Done() as done:
                        self.retired = self.retired or done.replace
                        self._end(done)
                        self._change()
                    case wire.Started(id=job_id, group=group):
                        self._groups[job_id] = group
                    case message:
                        raise AssertionError(f"unexpected `{message}`")
        except (ConnectionError, msgspec.DecodeError):
            pass  # the worker was killed, maybe in the middle of a line

    def _end(self, done: wire.Done) -> None:
        self._groups.pop(done.id, None)
        future = self._jobs.pop(done.id, None)
        if future is not None and not future.done():
            future.set_result(done)

    def _change(self) -> None:
        if self.changed is not None:
            self.changed(self)

    def _ending(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


async def _launch(
    connection: socket.socket, notes: BinaryIO, *, env: Mapping[str, str], root: str, log: Path | None
) -> asyncio.subprocess.Process:
    socket_fd = str(connection.fileno())
    with open(log or os.devnull, "ab") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", keeper.__file__, socket_fd),
            # -P: no file of the recipe may shadow a module of Python; -u: printed lines survive a crash
            *(sys.executable, "-P", "-u", "-m", "lightningrl.runner.worker", socket_fd, str(notes.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=root,
            env=env,
            pass_fds=[connection.fileno(), notes.fileno()],
            start_new_session=True,
        )
