"""One vLLM server as a child process: start it, wait until it is healthy, and end it with all of its processes.

A keeper is its parent (`lightningrl/keeper.py`), which ends the server when this process ends, even by `kill -9`.
"""

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import aiohttp

from lightningrl import keeper
from lightningrl.cpu import count_as_engine
from lightningrl.errors import EngineError

Say: TypeAlias = Callable[[str], None]
"""Receives a line for the user about what is being waited for."""

POLL_S = 0.25
PROBE_S = 30.0
"""Timeout of one health check. A server with much work on few cores may take seconds."""
EXIT_S = 10.0
"""Grace period for a server that was asked to exit."""
START_S = 1800.0
"""Timeout of a start: large models are read from slow disks, and compiled."""
TAIL = 30
"""Lines of the log's end that an error shows."""
PHASES = (
    (r"Initializing a V1 LLM engine", "starting its engine"),
    (r"Starting to load model", "loading the weights"),
    (r"Loading weights took", "warming up"),  # on a GPU: measuring memory, tracing
    (r"for vLLM's torch\.compile|Dynamo bytecode transform time|Warming up model for the compilation", "compiling"),
    (r"Capturing CUDA graphs", "capturing CUDA graphs"),
    (r"init engine \(|Starting vLLM server", "opening its port"),
)
"""What a line of the log says about the phase of the start, in the order of the phases. vLLM 0.30 to 0.33 print these
lines.
"""
FAILED = re.compile(r"EngineCore (?:encountered a fatal error|failed to start)")
"""vLLM 0.30 to 0.33 print this, and then the traceback."""
ERROR = re.compile(r"\] ((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .*)")
ADVICE = ", please check the stack trace above for the root cause"
"""vLLM's, at the end of an error."""


class VLLMProcess:
    """A running server. `start` makes one."""

    def __init__(
        self, process: asyncio.subprocess.Process, line: socket.socket, *, url: str, log: Path, offset: int
    ) -> None:
        """`offset`: where its part of the log begins, in bytes."""
        self.url = url
        self._process, self._line, self._log, self._offset = process, line, log, offset

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        port: int,
        log: Path,
        say: Say,
        timeout_s: float = START_S,
    ) -> "VLLMProcess":
        """Start a server and wait until it is healthy. Its output is added to `log`. Raises `EngineError`, with the end
        of the log, if it exits or takes too long.
        """
        offset = log.stat().st_size if log.exists() else 0
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno())),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        count_as_engine(process.pid)
        server = cls(process, ours, url=f"http://127.0.0.1:{port}", log=log, offset=offset)
        try:
            async with asyncio.timeout(timeout_s):
                await server._healthy(say)
        except TimeoutError as error:
            await server.stop()
            message = f"vLLM was not ready within {timeout_s:g} s:\n{server.tail()}"
            raise EngineError(message, hint=f"its log: `{log}`") from error
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def alive(self) -> bool:
        """Whether its process runs. A server whose engine has died exits soon, or answers no health check."""
        return self._process.returncode is None

    async def healthy(self) -> bool:
        """Whether it answers a health check."""
        if not self.alive:
            return False
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def exits(self, *, within_s: float) -> bool:
        """Whether it exits by itself within a time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        return not self.alive

    async def stop(self) -> None:
        """Ask it to exit, and kill what is left of it. Returns when all of its processes are gone."""
        try:
            children = self._children() if self.alive else []
            if children:
                for child in children:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(EXIT_S):
                        await self._process.wait()
        finally:
            self._line.close()  # the keeper kills what is left
        await self._process.wait()

    def kill(self) -> None:
        """Kill it at once, with all of its processes."""
        self._line.close()
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)  # the keeper kills them

    def ending(self) -> str:
        """How it ended, for people."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if cause := cause_of(self._logged()):  # the server whose engine has failed exits with code 0
            return cause
        return "it runs, but answers no health check" if code is None else f"exit code {code}"

    def resident_bytes(self) -> int:
        """Host memory of all of its processes. Shared pages are counted once for each."""
        page, total = os.sysconf("SC_PAGE_SIZE"), 0
        for process in keeper.descendants([self._process.pid], keeper.parents()):
            with suppress(OSError):
                total += int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * page
        return total

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._logged().splitlines()[-TAIL:])

    async def _healthy(self, say: Say) -> None:
        began, said = time.monotonic(), ""
        while not await self.healthy():
            if not self.alive:
                message = f"vLLM ended before it was ready ({self.ending()}):\n{self.tail()}"
                raise EngineError(message, hint=f"its log: `{self._log}`")
            phase = phase_of(self._logged()) or "starting"
            if phase != said:
                say(f"vLLM is {phase}")
                said = phase
            await asyncio.sleep(POLL_S)
        say(f"vLLM is ready after {time.monotonic() - began:.0f} s")

    def _children(self) -> list[int]:
        return [process for process, parent in keeper.parents().items() if parent == self._process.pid]

    def _logged(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._offset)
            return file.read().decode(errors="replace")


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def phase_of(log: str) -> str | None:
    """The latest phase of a start that its log tells of; None: none yet."""
    return next((phase for pattern, phase in reversed(PHASES) if re.search(pattern, log)), None)


def cause_of(log: str) -> str | None:
    """The error with which the engine failed, if its log tells of one. Later lines repeat it for every request."""
    failed = FAILED.search(log)
    error = ERROR.search(log, failed.end()) if failed else None
    return error[1].removesuffix(ADVICE) if error else None
