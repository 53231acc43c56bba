"""Processes that an agent leaves running end with its attempt; those of other attempts do not."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import AgentConfig
from lightningrl.runner import Outcome
from lightningrl.runner.conformance import attempt
from lightningrl.runner.pool import WorkerPool
from tests.runner.processes import alive, gone, written

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the keeper")

AGENT = """
import os, subprocess, time

def run(task):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(task["child"], "w") as file:
        file.write(str(child.pid))
    if task.get("die"):
        os.kill(os.getpid(), 9)
    return child.pid

def reward(task, output):
    return 1
"""


@asynccontextmanager
async def pool(root: Path, script: str | None = None) -> AsyncIterator[WorkerPool]:
    """A pool for a shell script as the agent; without a script, for a function."""
    (root / "agent.py").write_text(AGENT)
    how: dict[str, Any] = {"command": ["sh", "-c", script]} if script else {"entry": "agent:run"}
    runner = WorkerPool(AgentConfig(**how, reward="agent:reward", workers=1, concurrency=8), root=root)
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(runner: WorkerPool, name: str = "1", *, timeout_s: float = 60.0, **task: Any) -> Outcome:
    return await runner.run(*attempt(task, name=name, timeout_s=timeout_s))


async def test_a_child_that_holds_stdout_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    async with pool(tmp_path, "sleep 1000 & echo $! > child; echo done") as runner:
        began = time.monotonic()
        outcome = await run(runner)
        assert outcome.status == "succeeded" and outcome.output == "done"
        assert time.monotonic() - began < 20
        assert await gone([await written(tmp_path / "child")])


async def test_output_of_a_child_right_after_the_end_counts(tmp_path: Path) -> None:
    async with pool(tmp_path, "(sleep 0.01; echo late) & echo early") as runner:
        assert (await run(runner)).output == "early\nlate"


@linux
async def test_a_detached_process_ends_with_its_attempt_and_no_other_does(tmp_path: Path) -> None:
    detach = """
        name=$(python -c 'import json, sys; print(json.load(sys.stdin)["who"])')
        (setsid sleep 1000 < /dev/null > /dev/null 2>&1 & echo $! > $name.new; mv $name.new $name)
        while [ $name = neighbour ] && [ ! -e go ]; do sleep 0.05; done
        echo $name
    """
    async with pool(tmp_path, detach) as runner:
        neighbour = asyncio.create_task(run(runner, "1", who="neighbour"))
        theirs = await written(tmp_path / "neighbour")
        assert (await run(runner, "2", who="mine")).output == "mine"
        assert await gone([await written(tmp_path / "mine")], timeout_s=2)
        assert alive(theirs)
        (tmp_path / "go").touch()
        assert (await neighbour).output == "neighbour"
        assert await gone([theirs], timeout_s=2)


@linux
async def test_a_process_that_wiped_its_environment_goes_with_its_worker(tmp_path: Path) -> None:
    async with pool(
        tmp_path, "(env -i setsid sleep 1000 < /dev/null > /dev/null 2>&1 & echo $! > child); echo done"
    ) as runner:
        assert (await run(runner)).output == "done"
        child = await written(tmp_path / "child")
    assert await gone([child], timeout_s=1)


@linux
@pytest.mark.parametrize("how", ["close", "crash", "end its keeper"])
async def test_a_detached_process_of_a_function_goes_with_its_worker(tmp_path: Path, how: str) -> None:
    async with pool(tmp_path) as runner:
        outcome = await run(runner, child=str(tmp_path / "child"), die=how == "crash")
        assert outcome.status == ("lost" if how == "crash" else "succeeded")
        child = await written(tmp_path / "child")
        if how == "end its keeper":
            assert alive(child)
            os.kill(runner._workers[0].pid, signal.SIGTERM)
            assert await gone([child])
    assert await gone([child], timeout_s=1)


@linux
async def test_orphans_that_end_by_themselves_leave_no_zombies(tmp_path: Path) -> None:
    async with pool(tmp_path, "(setsid true &); sleep 0.2; echo done") as runner:
        keeper = runner._workers[0].pid
        await asyncio.gather(*(run(runner, str(i)) for i in range(3)))
        states = [
            stat
            for stat in (_stat(name) for name in os.listdir("/proc") if name.isdigit())
            if stat and stat[1] == str(keeper)
        ]
        assert len(states) == 1 and states[0][0] != "Z", "the worker alone"


def _stat(process: str) -> tuple[str, str] | None:
    """A process's state and parent; None if it has ended."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, parent
