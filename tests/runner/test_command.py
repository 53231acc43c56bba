"""Agents that are programs of their own, and what counts as their answer."""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import AgentConfig
from lightningrl.errors import AgentError
from lightningrl.runner import Outcome
from lightningrl.runner.command import answer_of
from lightningrl.runner.conformance import attempt
from lightningrl.runner.pool import WorkerPool
from lightningrl.runner.wire import MAX_OUTPUT
from tests.runner.processes import alive, gone, written

PROGRAM = """
import json, os, sys
task = json.load(sys.stdin)
assert len(json.dumps(task)) > 100000 or json.loads(os.environ["LIGHTNINGRL_TASK"]) == task
key, url = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
print(json.dumps({"x": len(str(task["x"])), "key": key, "url": url, "folder": os.getcwd()}))
"""


@asynccontextmanager
async def pool(root: Path, *command: str) -> AsyncIterator[WorkerPool]:
    (root / "grader.py").write_text("def reward(task, output):\n    return 1\n")
    runner = WorkerPool(AgentConfig(command=list(command), reward="grader:reward", workers=1, concurrency=8), root=root)
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(runner: WorkerPool, name: str = "1", *, timeout_s: float = 60.0, **task: Any) -> Outcome:
    return await runner.run(*attempt(task, name=name, timeout_s=timeout_s))


async def test_a_program_gets_its_task_and_a_key_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    async with pool(tmp_path, "python", "agent.py") as runner:
        outcomes = await asyncio.gather(*(run(runner, str(i), x=x) for i, x in enumerate(["abc", "x" * 300_000])))
    for i, outcome in enumerate(outcomes):
        assert outcome.status == "succeeded", outcome.error
        expected = {"x": [3, 300_000][i], "key": f"token-{i}", "url": "http://127.0.0.1:9/v1", "folder": str(tmp_path)}
        assert outcome.output == expected


async def test_an_answer_that_is_not_json_is_text(tmp_path: Path) -> None:
    async with pool(tmp_path, "echo", "it is", "blue") as runner:
        assert (await run(runner)).output == "it is blue"


async def test_the_answer_may_go_to_a_file_of_the_attempt(tmp_path: Path) -> None:
    async with pool(
        tmp_path, "sh", "-c", 'echo "thinking…"; cat > "$LIGHTNINGRL_OUTPUT"; echo "$LIGHTNINGRL_OUTPUT" >> files'
    ) as runner:
        outcomes = await asyncio.gather(*(run(runner, str(i), x=i) for i in range(2)))
    assert [outcome.output for outcome in outcomes] == [{"x": 0}, {"x": 1}]
    files = (tmp_path / "files").read_text().split()
    assert len(set(files)) == 2 and not any(Path(file).parent.exists() for file in files), "they are deleted"


async def test_a_failing_program_is_reported_with_the_end_of_its_stderr(tmp_path: Path) -> None:
    async with pool(tmp_path, "sh", "-c", "yes noise | head -n 90000 >&2; echo 'no such table' >&2; exit 3") as runner:
        outcome = await run(runner)
    assert outcome.status == "failed" and outcome.rewards == () and outcome.error
    assert outcome.error.splitlines()[0] == "AgentError: `sh` exited with code 3: no such table"
    assert len(outcome.error) < 5000


@pytest.mark.parametrize(
    "stderr",
    [
        "node:internal:873\n  throw new Error();\n\nError [ERR_MODULE_NOT_FOUND]: Cannot find package 'ai'\n"
        "    at resolve (x:9)\n\nNode.js v20.20.2",
        "java.lang.Exception: no such table\n\tat Main.main(Main.java:3)",
        "panic: no such table\n\ngoroutine 1 [running]:\nexit status 2",
        "ValueError: first\n\nDuring handling of the above exception, another exception occurred:\n\n"
        "KeyError: no such table",
    ],
)
async def test_a_failing_program_is_reported_with_the_line_of_its_error(tmp_path: Path, stderr: str) -> None:
    async with pool(tmp_path, "sh", "-c", f"printf %s {shlex.quote(stderr)} >&2; exit 1") as runner:
        outcome = await run(runner)
    assert outcome.error and outcome.error.splitlines()[0].endswith(("Cannot find package 'ai'", "no such table"))


async def test_a_program_that_is_killed_has_failed(tmp_path: Path) -> None:
    async with pool(tmp_path, "sh", "-c", "kill -SEGV $$") as runner:
        outcome = await run(runner)
    assert outcome.status == "failed" and outcome.error and "was ended by SIGSEGV" in outcome.error


async def test_a_program_that_floods_stdout_is_stopped(tmp_path: Path) -> None:
    async with pool(tmp_path, "yes") as runner:
        outcome = await run(runner)
    assert (
        outcome.status == "failed"
        and outcome.error
        and outcome.error.startswith("AgentError: the agent printed more than `16777216` bytes")
    )


async def test_on_timeout_the_whole_group_is_killed_and_the_worker_stays(tmp_path: Path) -> None:
    async with pool(
        tmp_path, "sh", "-c", "cat > /dev/null; sleep 1000 & echo $! > child; echo $$ > group; wait"
    ) as runner:
        worker = runner._workers[0].pid
        outcome = await run(runner, timeout_s=0.5)
        assert outcome.status == "timeout"
        assert await gone([await written(tmp_path / "child"), await written(tmp_path / "group")])
        assert runner._workers[0].pid == worker


@pytest.mark.parametrize("how", ["close", "kill"])
async def test_a_program_does_not_outlive_its_worker(tmp_path: Path, how: str) -> None:
    async with pool(tmp_path, "sh", "-c", "sleep 1000 & echo $! > child; wait") as runner:
        running = asyncio.create_task(run(runner))
        child = await written(tmp_path / "child")
        assert alive(child)
        if how == "kill":
            await asyncio.sleep(0.2)  # the worker reports the process group just after it has started it
            os.kill(runner._workers[0].pid, signal.SIGKILL)
        else:
            await runner.close()
        assert (await running).status == "lost"
        assert await gone([child])


async def test_a_program_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="no program `pyhton`") as raised:
        async with pool(tmp_path, "pyhton", "agent.py"):
            pass
    assert json.dumps(raised.value.hint) != "null"


@pytest.mark.parametrize(
    ("printed", "answer"),
    [
        (b'{"sql": "SELECT 1"}\n', {"sql": "SELECT 1"}),
        (b'{\n  "sql": 1\n}\n', {"sql": 1}),
        (b"42\n", 42),
        (b"it is blue\n", "it is blue"),
        (b"loading\ncalling the model\n" + b'{"sql": "SELECT 1"}\n', {"sql": "SELECT 1"}),
        (b"loading\r\n[1, 2]\r\n\r\n", [1, 2]),
        (b"Dear reader,\nthe answer is\n42\n", "Dear reader,\nthe answer is\n42"),
        (b"a list:\n[ ] buy milk\n", "a list:\n[ ] buy milk"),
        (b"", ""),
    ],
)
def test_stdout_is_the_answer_or_its_last_line_if_that_is_json_after_logs(
    tmp_path: Path, printed: bytes, answer: Any
) -> None:
    assert answer_of(printed, tmp_path / "output") == answer


@pytest.mark.parametrize(
    ("written", "answer"), [('{"x": 1}', {"x": 1}), ("two\nlines\n", "two\nlines"), ("", "printed")]
)
def test_the_output_file_takes_precedence_over_stdout(tmp_path: Path, written: str, answer: Any) -> None:
    (tmp_path / "output").write_text(written)
    assert answer_of(b"printed\n", tmp_path / "output") == answer


def test_a_file_that_is_too_long_is_the_agents_failure(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        file.truncate(MAX_OUTPUT + 1)
    with pytest.raises(AgentError, match="wrote more than `16777216` bytes"):
        answer_of(b"", tmp_path / "output")
