"""The process that runs agents: `python -m lightningrl.runner.worker <fd> <notes>`, several attempts at the same time.

It reads jobs from the socket `fd`, calls agent and reward function for each, and writes back how that ended. Its
watchdog writes to the file `notes` which of them blocks the others. Its own stdout and stderr belong to user code. When
the socket closes, its parent is gone, and it goes too; its keeper ends what it has started.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from lightningrl import plugins
from lightningrl.errors import AgentError, GraderError, UserError
from lightningrl.runner import attach, watchdog, wire
from lightningrl.runner.boundary import Blame, as_json, as_rewards, attributed, call, describe
from lightningrl.runner.command import run_command
from lightningrl.runner.environment import telemetry
from lightningrl.runner.exhaustion import files_are_short, is_exhaustion
from lightningrl.runner.flush import flush_spans

SETTLE_S = 1.0
"""What a coroutine or a command gets to clean up after it was cancelled."""
HELD_UP = 0.1
"""Share of an attempt's time; if others have blocked it for longer, that it was late says nothing of it."""
STOP_S = 2.0
"""What all of them get when the worker leaves."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """One attempt under way."""

    job: wire.Job
    phase: Literal["agent", "grader"] = "agent"
    threads: list[threading.Thread] = field(default_factory=list)
    held_up_s: float = 0.0
    """For how long others have blocked the event loop."""
    by_whom: bool = True
    """Whether it is known who has."""


class Worker:
    """Runs jobs; `send` carries its answers."""

    def __init__(self, setup: wire.Setup, *, send: Callable[[wire.FromWorker], None]) -> None:
        self._command = setup.command
        self._reward_range = setup.reward_range
        self._send = send
        self._tasks: dict[str, asyncio.Task[wire.Done]] = {}
        self._progress: dict[str, Progress] = {}
        self._supervisors: set[asyncio.Task[None]] = set()
        if setup.command is not None:
            _check_program(setup.command[0])
        else:
            self._agent = _load(setup.entry or "", kind="agent", root=Path(setup.root), blame=AgentError)
        self._grade = _load(setup.reward, kind="reward", root=Path(setup.root), blame=GraderError)

    def start(self, job: wire.Job) -> None:
        progress = self._progress[job.id] = Progress(job=job)
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
        """End everything that can be ended."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_S)

    def held_up(self, job_id: str, seconds: float) -> None:
        """This job, or an unknown one if it is "", has blocked the event loop."""
        for progress in self._progress.values():
            if progress.job.id != job_id and len(self._progress) > 1:
                progress.held_up_s += seconds
                progress.by_whom = progress.by_whom and bool(job_id)

    async def _supervise(self, progress: Progress, task: asyncio.Task[wire.Done]) -> None:
        """Report how the attempt ended, on time even if it does not end."""
        job = progress.job
        late = not (await asyncio.wait({task}, timeout=job.timeout_s))[0]
        if late:
            task.cancel()
            await asyncio.wait({task}, timeout=SETTLE_S)
        del self._tasks[job.id], self._progress[job.id]
        if late or task.cancelled():
            goes_on = not task.done() or any(thread.is_alive() for thread in progress.threads)
            done = _late(progress) if late else wire.Done(id=job.id, status="lost", error="it was given up")
        else:
            goes_on, done = False, task.result()
        self._send(msgspec.structs.replace(done, replace=done.replace or goes_on or files_are_short()))

    async def _attempt(self, progress: Progress) -> wire.Done:
        job = progress.job
        output = b"null"
        try:
            output = as_json(await self._run_agent(progress))
            await flush_spans()
            progress.phase = "grader"
            attach.identity.set(None)  # what a judge model is asked is not the agent's doing
            with attributed(GraderError):
                value = await call(
                    self._grade, msgspec.json.decode(job.input), msgspec.json.decode(output), threads=progress.threads
                )
                rewards = as_rewards(value, within=self._reward_range)
        except (AgentError, GraderError) as error:
            told = wire.speakable(f"{type(error).__name__}: {error}")
            if is_exhaustion(error):  # by whichever of its attempts
                return wire.Done(id=job.id, status="lost", error=told, replace=True, suspect=True)
            return wire.Done(id=job.id, status="failed", output=msgspec.Raw(output), error=told)
        return wire.Done(
            id=job.id,
            status="succeeded",
            output=msgspec.Raw(output),
            rewards={wire.speakable(name): value for name, value in rewards.items()},
        )

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
                )
            os.environ.update({name: value for name, value in job.env.items() if job.token not in value})
            attach.attach(job.token, base_url=job.env["OPENAI_BASE_URL"], attempt_id=job.id)
            return await call(self._agent, msgspec.json.decode(job.input), threads=progress.threads)


def _late(progress: Progress) -> wire.Done:
    """Its own fault, unless others have blocked the event loop for a good part of its time."""
    job = progress.job
    if progress.held_up_s > HELD_UP * job.timeout_s:
        error = f"other attempts in its process blocked the event loop for {progress.held_up_s:.1f} of its {job.timeout_s:g} s"
        return wire.Done(id=job.id, status="lost", error=error, suspect=not progress.by_whom)
    blame, what = ("AgentError", "answer") if progress.phase == "agent" else ("GraderError", "reward")
    return wire.Done(id=job.id, status="timeout", error=f"{blame}: timed out, no {what} within {job.timeout_s:g} s")


def _load(name: str, *, kind: str, root: Path, blame: Blame) -> Callable[..., Any]:
    try:
        function = plugins.load(name, kind=kind, root=root)
    except UserError as error:
        raise blame(error.message, hint=error.hint) from error
    except (
        BaseException
    ) as error:  # importing user code may raise anything; `SystemExit` is what a script without a main guard does
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


def _check_program(program: str) -> None:
    if shutil.which(program) is None:
        raise AgentError(
            f"there is no program `{program}`",
            hint="`command` is looked up on PATH, or from the recipe's folder if it has a `/`",
        )


async def _serve(connection: socket.socket, notes: int) -> NoReturn:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=wire.MAX_LINE)
    setup = wire.to_worker.decode(await reader.readline())
    assert isinstance(setup, wire.Setup)

    def send(message: wire.FromWorker) -> None:
        writer.write(wire.line(message))

    attach.install()
    try:
        worker = Worker(setup, send=send)
    except (AgentError, GraderError) as error:
        send(
            wire.Refused(
                owner="agent" if isinstance(error, AgentError) else "grader", message=error.message, hint=error.hint
            )
        )
        await writer.drain()
        os._exit(0)
    watchdog.Watchdog(asyncio.get_running_loop(), notes, held_up=worker.held_up)
    send(wire.Ready())
    with suppress(ConnectionError):  # the parent was killed before it had read everything
        await _listen(reader, worker)
    await worker.stop()
    os._exit(0)  # what is left is ended by the keeper


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
