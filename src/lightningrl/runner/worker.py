"""The process that runs agents: `python -m lightningrl.runner.worker <fd> <notes>`, several attempts at the same time.

It reads jobs from the socket `fd`, calls the agent and the reward function for each, and writes back the results. Its
watchdog writes to the file `notes` which attempt blocks the event loop. Its stdout and stderr belong to user code; what
an attempt prints is marked with its id. When the parent dies, the socket closes and the worker exits; its keeper then
kills what the worker has started.
"""

import asyncio
import faulthandler
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from lightningrl import plugins
from lightningrl.errors import AgentError, GraderError, UserError
from lightningrl.runner import attach, tool_hooks, watchdog, wire
from lightningrl.runner.boundary import Blame, as_json, as_rewards, attributed, call, describe
from lightningrl.runner.command import run_command
from lightningrl.runner.environment import telemetry
from lightningrl.runner.exhaustion import files_are_short, is_exhaustion
from lightningrl.runner.flush import flush_spans
from lightningrl.runner.isolation import Isolation, visible
from lightningrl.runner.printed import Printed
from lightningrl.runner.replayed import fetch
from lightningrl.runner.tool_playback import NOTHING, ToolPlayback

SETTLE_S = 1.0
"""Grace period for a coroutine or a command after it was cancelled."""
HELD_UP = 0.1
"""Share of an attempt's timeout. If others have blocked it for longer, it is not to blame for its timeout."""
STOP_S = 2.0
"""Grace period for all attempts when the worker exits."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """A running attempt."""

    job: wire.Job
    phase: Literal["agent", "grader"] = "agent"
    threads: list[threading.Thread] = field(default_factory=list)
    held_up_s: float = 0.0
    """Seconds for which other attempts have blocked the event loop."""
    culprits_known: bool = True
    """Whether it is known which attempts those were."""
    tools: ToolPlayback = NOTHING
    """The tool results that it plays back."""


class Worker:
    """Runs jobs and reports on them through `send`."""

    def __init__(self, setup: wire.Setup, *, send: Callable[[wire.FromWorker], None], printed: Printed) -> None:
        self._command, self._isolation = setup.command, setup.isolation
        self._reward_range = setup.reward_range
        self._send, self._printed = send, printed
        self._tasks: dict[str, asyncio.Task[wire.Done]] = {}
        self._progress: dict[str, Progress] = {}
        self._supervisors: set[asyncio.Task[None]] = set()
        root = Path(setup.root)
        if setup.command is not None:
            _check_program(setup.command[0], setup.isolation, root=root)
        elif setup.entry is not None:
            self._agent = _load(setup.entry, kind="agent", root=root, blame=AgentError)
        self._grade: Callable[..., Any] | None = None
        if setup.reward is not None:
            self._grade = _load(setup.reward, kind="reward", root=root, blame=GraderError)

    def start(self, job: wire.Job) -> None:
        progress = self._progress[job.id] = Progress(job=job)
        self._printed.begin(job.id)
        context = copy_context()
        context.run(watchdog.running.set, job.id)
        task = asyncio.create_task(self._attempt(progress), context=context)
        self._tasks[job.id] = task
        supervisor = asyncio.create_task(self._supervise(progress, task))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)

    def cancel(self, job_id: str) -> None:
        if job_id in self._tasks:
            self._tasks[job_id].cancel()

    async def stop(self) -> None:
        """Cancel all jobs and wait for them, for `STOP_S` at most."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_S)

    def held_up(self, job_id: str, seconds: float) -> None:
        """Note that a job, or an unknown one if `job_id` is "", has blocked the event loop."""
        for progress in self._progress.values():
            if progress.job.id != job_id and len(self._progress) > 1:
                progress.held_up_s += seconds
                progress.culprits_known = progress.culprits_known and bool(job_id)

    async def _supervise(self, progress: Progress, task: asyncio.Task[wire.Done]) -> None:
        """Report the attempt's result, on time even if the attempt does not end."""
        job = progress.job
        late = not (await asyncio.wait({task}, timeout=job.timeout_s))[0]
        if late:
            task.cancel()
            await asyncio.wait({task}, timeout=SETTLE_S)
        del self._tasks[job.id], self._progress[job.id]
        self._printed.end(job.id)
        if late or task.cancelled():
            goes_on = not task.done() or any(thread.is_alive() for thread in progress.threads)
            done = _late(progress) if late else wire.Done(id=job.id, status="lost", error="it was given up")
        else:
            goes_on, done = False, task.result()
        void = progress.tools.why_void(succeeded=done.status == "succeeded")
        if void is not None:
            done = wire.Done(id=job.id, status="failed", error=wire.speakable(void), replace=done.replace)
        self._send(msgspec.structs.replace(done, replace=done.replace or goes_on or files_are_short()))

    async def _attempt(self, progress: Progress) -> wire.Done:
        job = progress.job
        output = b"null"
        if job.branch and self._command is None and (done := await _begin_tools(progress)) is not None:
            return done
        try:
            if isinstance(job, wire.Grading):
                output = bytes(job.output)
            else:
                output = as_json(await self._run_agent(progress))
                await flush_spans()
            rewards = {} if self._grade is None else await self._rewards(progress, output, self._grade)
        except (AgentError, GraderError) as error:
            error_text = wire.speakable(f"{type(error).__name__}: {error}")
            if is_exhaustion(error):  # any attempt of this worker may be the cause
                return wire.Done(id=job.id, status="lost", error=error_text, replace=True, suspect=True)
            return wire.Done(id=job.id, status="failed", output=msgspec.Raw(output), error=error_text)
        return wire.Done(
            id=job.id,
            status="succeeded",
            output=msgspec.Raw(output),
            rewards={wire.speakable(name): value for name, value in rewards.items()},
        )

    async def _rewards(self, progress: Progress, output: bytes, grade: Callable[..., Any]) -> dict[str, float]:
        progress.phase = "grader"
        attach.identity.set(None)  # a grader's calls to a judge model are not the agent's
        with attributed(GraderError):
            inputs = msgspec.json.decode(progress.job.input), msgspec.json.decode(output)
            value = await call(grade, *inputs, threads=progress.threads)
            return as_rewards(value, within=self._reward_range)

    async def _run_agent(self, progress: Progress) -> Any:
        job = progress.job
        with attributed(AgentError):
            if self._command is not None:
                gateway = attach.gateway_of(job.env["OPENAI_BASE_URL"]).geturl()
                env = job.env | telemetry(gateway, key=job.token, environment=os.environ)
                return await run_command(
                    self._command,
                    bytes(job.input),
                    env,
                    attempt_id=job.id,
                    started=lambda group: self._send(wire.Started(id=job.id, group=group)),
                    printed=partial(self._printed.write, attempt_id=job.id),
                    isolation=self._isolation,
                )
            os.environ.update({name: value for name, value in job.env.items() if job.token not in value})
            attach.identity.set(replace(_identity(job), tools=progress.tools))
            return await call(self._agent, msgspec.json.decode(job.input), threads=progress.threads)


def _identity(job: wire.Job) -> attach.Identity:
    gateway = attach.gateway_of(job.env["OPENAI_BASE_URL"])
    return attach.Identity(token=job.token, gateway=gateway, attempt_id=job.id)


async def _begin_tools(progress: Progress) -> wire.Done | None:
    """Ask the gateway what a branch plays back of its trunk's tools, and patch frameworks if it does. Returns how the
    attempt ends if it cannot begin.
    """
    job, loop, task = progress.job, asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def withheld() -> None:
        loop.call_soon_threadsafe(loop.call_later, SETTLE_S, task.cancel)  # whatever the agent does

    try:
        progress.tools = tools = await asyncio.to_thread(fetch, _identity(job))
        if tools.mode != "rerun":
            await asyncio.to_thread(tool_hooks.install)
            tools.on_withheld = withheld
    except UserError as error:
        return wire.Done(id=job.id, status="failed", error=wire.speakable(f"UserError: {error}"))
    except (OSError, HTTPException) as error:
        error_text = wire.speakable(f"the gateway does not tell recorded tool results: {error}")
        return wire.Done(id=job.id, status="lost", error=error_text)
    return None


def _late(progress: Progress) -> wire.Done:
    """The result of an attempt that timed out: its own fault, unless others blocked the event loop for too long."""
    job = progress.job
    if progress.held_up_s > HELD_UP * job.timeout_s:
        share = f"{progress.held_up_s:.1f} of its {job.timeout_s:g} s"
        error = f"other attempts in its process blocked the event loop for {share}"
        return wire.Done(id=job.id, status="lost", error=error, suspect=not progress.culprits_known)
    blame, what = ("AgentError", "answer") if progress.phase == "agent" else ("GraderError", "reward")
    return wire.Done(id=job.id, status="timeout", error=f"{blame}: timed out, no {what} within {job.timeout_s:g} s")


def _load(name: str, *, kind: str, root: Path, blame: Blame) -> Callable[..., Any]:
    try:
        function = plugins.load(name, kind=kind, root=root)
    except UserError as error:
        raise blame(error.message, hint=error.hint) from error
    except BaseException as error:  # a script without a main guard may even raise `SystemExit`
        module = name.partition(":")[0]
        raise blame(
            f"{kind} `{name}` cannot be imported: {describe(error)}",
            hint=f"try `python -c 'import {module}'` in `{root}`",
        ) from error
    if not callable(function):
        raise blame(
            f"{kind} `{name}` is a `{type(function).__name__}`, not a function",
            hint="name a function that takes the task's input",
        )
    return function


def _check_program(program: str, isolation: Isolation | None, *, root: Path) -> None:
    found = shutil.which(program)
    if found is None:
        raise AgentError(
            f"there is no program `{program}`",
            hint="`command` is looked up on PATH, or from the recipe's folder if it has a `/`",
        )
    if isolation is not None and not visible(found, isolation, root=root):
        message = f"the program `{found}` is not in the sandbox"
        raise AgentError(message, hint="add its folder to `agent.readable`, with all that it loads")


async def _serve(connection: socket.socket, notes: int) -> NoReturn:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=wire.MAX_LINE)
    setup = wire.to_worker.decode(await reader.readline())
    assert isinstance(setup, wire.Setup)

    def send(message: wire.FromWorker) -> None:
        writer.write(wire.line(message))

    attach.install()
    printed = Printed()
    printed.install()
    try:
        worker = Worker(setup, send=send, printed=printed)
    except (AgentError, GraderError) as error:
        owner = "agent" if isinstance(error, AgentError) else "grader"
        send(wire.Refused(owner=owner, message=error.message, hint=error.hint))
        await writer.drain()
        os._exit(0)
    watchdog.Watchdog(asyncio.get_running_loop(), notes, held_up=worker.held_up)
    send(wire.Ready())
    with suppress(ConnectionError):  # the parent was killed while we wrote
        await _listen(reader, worker)
    await worker.stop()
    os._exit(0)  # the keeper kills what is left


async def _listen(reader: asyncio.StreamReader, worker: Worker) -> None:
    while line := await reader.readline():
        match wire.to_worker.decode(line):
            case wire.Job() as job:
                worker.start(job)
            case wire.Cancel(id=job_id):
                worker.cancel(job_id)
            case wire.Setup():
                raise AssertionError("set up twice")


def main(arguments: Iterable[str]) -> None:
    descriptor, notes = map(int, arguments)
    faulthandler.enable()
    os.set_inheritable(notes, False)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    asyncio.run(_serve(connection, notes))


if __name__ == "__main__":
    main(sys.argv[1:])
