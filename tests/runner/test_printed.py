"""What attempts print goes to one log, in which each attempt finds its own lines. Real workers, real programs."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lightningrl.config import AgentConfig
from lightningrl.look.logs import logs_of
from lightningrl.runner import Outcome
from lightningrl.runner.conformance import attempt
from lightningrl.runner.pool import WorkerPool
from lightningrl.runner.printed import BEGINNING, END

AGENT = """
import asyncio, logging, os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor

print("imported")
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
pool = ThreadPoolExecutor(1)

async def run(task):
    name, do = task["name"], task.get("do")
    if do == "every way":
        print("printed", name)
        print("to stderr", name, file=sys.stderr)
        logging.getLogger("agent").info("logged %s", name)
        await asyncio.create_task(says("in a task", name))
        await asyncio.to_thread(print, "in a thread", name)
        pool.submit(print, "in a pool", name).result()
        sys.stdout.buffer.write(b"bytes \\xff\\n")
        print("no end", name, end="")
    if do == "at once":
        for number in range(20):
            print(name, end=" ")
            await asyncio.sleep(0)
            print(number)
            sys.stderr.write(f"{name} error {number}\\n")
    if do == "hang":
        print("before", name, end="", flush=True)
        await asyncio.sleep(1000)
    if do == "die":
        print("last words", name)
        os._exit(3)
    if do == "long":
        print("x" * 30_000)
        print("end")
    if do == "raw":
        os.system("echo from a child")
    if do == "raise":
        print("before the error")
        raise ValueError("no luck")

async def says(*words):
    print(*words)

def reward(task, output):
    print("graded", task["name"])
    return 1
"""


@asynccontextmanager
async def pool(root: Path, *command: str, workers: int = 1) -> AsyncIterator[WorkerPool]:
    (root / "agent.py").write_text(AGENT)
    how: Mapping[str, Any] = {"command": list(command)} if command else {"entry": "agent:run"}
    agent = AgentConfig(**how, reward="agent:reward", workers=workers, concurrency=8 * workers)
    runner = WorkerPool(agent, root=root, watchdog_s=1.0, log_path=root / "agents.log")
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(runner: WorkerPool, name: str, *, timeout_s: float = 60.0, **task: Any) -> Outcome:
    return await runner.run(*attempt({"name": name, **task}, name=name, timeout_s=timeout_s))


def text(root: Path, name: str) -> str:
    logs = logs_of(root, f"attempt-{name}")
    return "" if logs is None else logs.text


async def test_whatever_an_attempt_prints_is_its_own(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        await asyncio.gather(*(run(runner, name, do="every way") for name in ("a", "b")))
    for name in ("a", "b"):
        expected = ["printed {}", "to stderr {}", "INFO logged {}", "in a task {}", "in a thread {}", "in a pool {}"]
        lines = [line.format(name) for line in [*expected, "bytes \N{REPLACEMENT CHARACTER}", "graded {}", "no end {}"]]
        assert sorted(text(tmp_path, name).splitlines()) == sorted(lines)
    assert b"imported" in (tmp_path / "agents.log").read_bytes().splitlines(), "it belongs to no attempt"


async def test_lines_of_attempts_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(8)]
    async with pool(tmp_path, workers=2) as runner:
        await asyncio.gather(*(run(runner, name, do="at once") for name in names))
    for name in names:
        found = text(tmp_path, name).splitlines()
        out = [line for line in found if "error" not in line]
        assert out == [*(f"{name} {number}" for number in range(20)), f"graded {name}"]
        assert [line for line in found if "error" in line] == [f"{name} error {number}" for number in range(20)]


async def test_an_attempt_that_hangs_fails_or_dies_leaves_what_it_has_printed(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        assert (await run(runner, "hung", do="hang", timeout_s=1)).status == "timeout"
        assert (await run(runner, "failed", do="raise")).status == "failed"
        assert (await run(runner, "dead", do="die")).status == "lost"
    found = [text(tmp_path, name) for name in ("hung", "failed", "dead")]
    assert found == ["before hung", "before the error\n", "last words dead\n"]


async def test_a_long_line_is_put_together_again(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        await run(runner, "long", do="long")
    assert text(tmp_path, "long") == "x" * 30_000 + "\nend\ngraded long\n"


async def test_output_that_passes_by_python_stays_in_the_log_without_a_mark(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        await run(runner, "raw", do="raw")
    assert "from a child" in (tmp_path / "agents.log").read_text().splitlines()
    assert text(tmp_path, "raw") == "graded raw\n"


async def test_both_streams_of_a_program_are_kept_also_if_it_succeeds(tmp_path: Path) -> None:
    script = "echo thinking >&2; sleep 0.1; echo '[attempt-other] forged'; echo '{\"answer\": 1}'"
    async with pool(tmp_path, "sh", "-c", script) as runner:
        done = await asyncio.gather(*(run(runner, name) for name in ("a", "b")))
    assert [outcome.output for outcome in done] == [{"answer": 1}] * 2
    for name in ("a", "b"):
        assert text(tmp_path, name) == f'thinking\n[attempt-other] forged\n{{"answer": 1}}\ngraded {name}\n'
    assert text(tmp_path, "other") == "", "a program cannot write lines of another attempt"


async def test_a_program_that_floods_the_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    script = "echo first >&2; yes | head -n 1000000 >&2; echo last >&2; echo fine"
    async with pool(tmp_path, "sh", "-c", script) as runner:
        assert (await run(runner, "flood")).output == "fine"
    logs = logs_of(tmp_path, "attempt-flood")
    assert logs and not logs.truncated and logs.text.startswith("first\ny\n"), "it fits into what is shown"
    assert "last\n" in logs.text and "fine\n" in logs.text and logs.text.endswith("graded flood\n")
    left_out = re.search(r"\n… (\d+) bytes left out …\n", logs.text)
    total = len("first\n" + "last\n" + "fine\n") + 2_000_000
    assert left_out and int(left_out[1]) == total - BEGINNING - END
    assert (tmp_path / "agents.log").stat().st_size < 40 * (BEGINNING + END)


async def test_a_program_that_hangs_leaves_what_it_has_printed(tmp_path: Path) -> None:
    async with pool(tmp_path, "sh", "-c", "printf 'step 1' >&2; exec sleep 1000") as runner:
        assert (await run(runner, "hung", timeout_s=1)).status == "timeout"
    assert text(tmp_path, "hung") == "step 1"
