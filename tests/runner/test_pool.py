"""The pool of worker processes: real processes, real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import AgentConfig
from lightningrl.errors import AgentError
from lightningrl.runner import Outcome
from lightningrl.runner.conformance import CHECKS, Check, attempt
from lightningrl.runner.pool import WorkerPool
from tests.runner.processes import alive, gone, written

AGENT = '''
import asyncio, os, subprocess, time

def pid(task):
    return os.getpid()

def run(task):
    """Write down the process id, then follow the task."""
    if "child" in task:
        with open(task["child"], "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
    if "note" in task:
        with open(task["note"], "w") as file:
            file.write(str(os.getpid()))
    time.sleep(task.get("sleep", 0))
    return os.getpid()

async def stubborn(task):
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def polite(task):
    try:
        await asyncio.sleep(task.get("sleep", 1000))
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)
        raise
    return os.getpid()

async def blocking(task):
    if task.get("block"):
        time.sleep(1000)
    await asyncio.sleep(1000)

def leaves(task):
    raise SystemExit("enough")

async def sees(task):
    return dict(os.environ)

def modules(task):
    import sys
    return sorted(sys.modules)

def dies_in_mid_sentence(task):
    import sys
    os.write(int(sys.argv[1]), b'{"type":"Done","id":')
    os._exit(1)

def hangs_in_grading(task, output):
    time.sleep(1000)

def reward(task, output):
    return 1

def as_told(task, output):
    return task["reward"]
'''


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_worker_pool_conforms(check: Check, tmp_path: Path) -> None:
    await check(lambda agent, root: WorkerPool(agent, root=root), tmp_path)


@asynccontextmanager
async def pool(
    root: Path,
    entry: str,
    *,
    reward: str = "agent:reward",
    reward_range: tuple[float, float] | None = None,
    workers: int = 1,
    concurrency: int = 8,
) -> AsyncIterator[WorkerPool]:
    (root / "agent.py").write_text(AGENT)
    env = {"FLAVOUR": "mint"}
    agent = AgentConfig(
        entry=entry, reward=reward, reward_range=reward_range, workers=workers, concurrency=concurrency, env=env
    )
    runner = WorkerPool(agent, root=root, env={"OPENAI_BASE_URL": "http://gateway/v1"}, log_path=root / "agent.log")
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(runner: WorkerPool, name: str = "1", *, timeout_s: float = 60.0, **task: Any) -> Outcome:
    return await runner.run(*attempt(task, name=name, timeout_s=timeout_s))


async def test_attempts_are_spread_over_the_workers(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:run", workers=2) as runner:
        results = await asyncio.gather(*(run(runner, str(i), sleep=0.2) for i in range(8)))
    pids = [r.output for r in results]
    assert sorted(pids.count(pid) for pid in set(pids)) == [4, 4]


async def test_more_attempts_than_concurrency_wait_their_turn(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:run", concurrency=2) as runner:
        started = time.monotonic()
        results = await asyncio.gather(*(run(runner, str(i), sleep=0.2) for i in range(6)))
        seconds = time.monotonic() - started
    assert all(r.status == "succeeded" for r in results)
    assert seconds >= 0.6, "six attempts of 0.2 s, two at a time"


async def test_a_hung_callable_times_out_alone_and_its_worker_is_replaced(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:run") as runner:
        beside = asyncio.create_task(run(runner, "beside", sleep=2.0))
        before = time.monotonic()
        hung = await run(runner, "hung", timeout_s=0.5, sleep=1000, note=str(tmp_path / "pid"))
        assert time.monotonic() - before < 2.0
        after = await run(runner, "after")
        old = await written(tmp_path / "pid")
        assert hung.status == "timeout" and hung.error and hung.error.startswith("AgentError: timed out")
        assert after.status == "succeeded" and after.output != old
        assert (await beside).output == old, "it had time to finish"
        assert await gone([old])


async def test_a_coroutine_that_times_out_costs_no_worker(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:polite") as runner:
        first = await run(runner, "0", sleep=0)
        assert (await run(runner, "1", timeout_s=0.2)).status == "timeout"
        assert (await run(runner, "2", sleep=0)).output == first.output


async def test_a_coroutine_that_will_not_be_cancelled_costs_its_worker_only(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:stubborn") as runner:
        for name in "ab":
            assert (await run(runner, name, timeout_s=0.2)).status == "timeout"


async def test_a_killed_worker_loses_what_it_ran_and_is_replaced(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:run") as runner:
        running = asyncio.create_task(
            run(runner, "1", sleep=1000, note=str(tmp_path / "pid"), child=str(tmp_path / "child"))
        )
        worker = await written(tmp_path / "pid")
        os.kill(worker, signal.SIGKILL)
        lost = await running
        assert lost.status == "lost" and lost.error and "signal 9" in lost.error
        assert await gone([await written(tmp_path / "child")]), "its child process ends, too"
        assert (await run(runner, "2")).output != worker


async def test_a_worker_that_dies_in_the_middle_of_a_message_is_replaced(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:dies_in_mid_sentence") as runner:
        for name in "ab":
            assert (await run(runner, name)).status == "lost"


async def test_an_agent_that_exits_has_failed_and_the_worker_lives(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:leaves") as runner:
        for name in "ab":
            outcome = await run(runner, name)
            assert (
                outcome.status == "failed"
                and outcome.error
                and outcome.error.startswith("AgentError: SystemExit: enough")
            )


async def test_a_hung_grader_is_blamed(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:pid", reward="agent:hangs_in_grading") as runner:
        outcome = await run(runner, timeout_s=0.5)
        assert (
            outcome.status == "timeout"
            and outcome.error
            and outcome.error.startswith("GraderError: timed out, no reward")
        )


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (1.5, "reward `final` is `1.5`, outside its range `[-1, 1]`"),
        ({"final": -2, "f1": 0.5}, "reward `final` is `-2.0`, outside its range `[-1, 1]`"),
        (1 + 1e-6, "reward `final` is `1.000001`, outside its range `[-1, 1]`"),
    ],
)
async def test_a_reward_outside_its_declared_range_is_the_graders_failure(
    tmp_path: Path, reward: Any, said: str
) -> None:
    async with pool(tmp_path, "agent:pid", reward="agent:as_told", reward_range=(-1.0, 1.0)) as runner:
        outcome = await run(runner, reward=reward)
        assert outcome.status == "failed" and outcome.rewards == ()
        assert outcome.error == f"GraderError: {said}\nhint: fix the reward function, or widen `agent.reward_range`"


@pytest.mark.parametrize(
    ("reward", "final"), [(-1, -1), (1, 1), (1 + 1e-15, 1 + 1e-15), ({"final": 0.5, "tokens": 300}, 0.5)]
)
async def test_a_reward_at_the_end_of_its_range_counts_and_so_does_what_rounding_has_put_beyond_it(
    tmp_path: Path, reward: Any, final: float
) -> None:
    async with pool(tmp_path, "agent:pid", reward="agent:as_told", reward_range=(-1.0, 1.0)) as runner:
        outcome = await run(runner, reward=reward)
        assert outcome.status == "succeeded" and outcome.rewards[0].value == final


async def test_a_cancelled_attempt_is_ended(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:polite", concurrency=1) as runner:
        task = asyncio.create_task(run(runner, "1"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await run(runner, "2", sleep=0)).status == "succeeded", "its place is free again"


async def test_the_environment_has_the_model_address_but_no_token(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:sees") as runner:
        seen = (await run(runner)).output
    assert seen["OPENAI_BASE_URL"] == "http://127.0.0.1:9/v1" == seen["OPENAI_API_BASE"]
    assert seen["FLAVOUR"] == "mint" and seen["LANGSMITH_TRACING"] == "false"
    assert "token-1" not in json.dumps(seen)


async def test_a_worker_loads_no_torch(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:modules") as runner:
        loaded = (await run(runner)).output
    assert "lightningrl.runner.worker" in loaded or "__main__" in loaded
    assert not {"torch", "transformers"} & set(loaded)


async def test_a_process_that_dies_before_it_reads_anything_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightningrl.runner.process.sys.executable", "/bin/false")
    too_much_for_a_socket = ["true", "x" * 2**22]
    runner = WorkerPool(AgentConfig(command=too_much_for_a_socket, reward="dies:reward"), root=tmp_path)
    with pytest.raises(AgentError, match=r"died while it loaded the agent \(exit code 1\)"):
        await runner.start()


async def test_a_process_that_dies_while_loading_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nprint('so long')\nos._exit(7)\n")
    runner = WorkerPool(
        AgentConfig(entry="dies:run", reward="dies:reward"), root=tmp_path, log_path=tmp_path / "agent.log"
    )
    with pytest.raises(AgentError, match=r"died while it loaded the agent \(exit code 7\)") as raised:
        await runner.start()
    assert "agent.log" in (raised.value.hint or "") and "so long" in (tmp_path / "agent.log").read_text()


async def test_a_module_that_never_finishes_loading_is_reported(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(1000)\n")
    runner = WorkerPool(
        AgentConfig(entry="waits:run", reward="waits:reward", workers=1), root=tmp_path, start_timeout_s=1.0
    )
    with pytest.raises(AgentError, match="not loaded within 1 s"):
        await runner.start()


async def test_if_the_agent_no_longer_loads_waiting_attempts_fail(tmp_path: Path) -> None:
    async with pool(tmp_path, "agent:run") as runner:
        worker = (await run(runner, "1")).output
        (tmp_path / "agent.py").write_text("raise RuntimeError('edited meanwhile')\n")
        os.kill(worker, signal.SIGKILL)
        assert await gone([worker])
        await asyncio.sleep(0.1)
        outcome = await run(runner, "2")
        assert outcome.status == "failed" and outcome.error and "edited meanwhile" in outcome.error


async def test_closing_leaves_no_process(tmp_path: Path) -> None:
    notes: dict[str, Any] = {"note": str(tmp_path / "pid"), "child": str(tmp_path / "child")}
    async with pool(tmp_path, "agent:run") as runner:
        running = asyncio.create_task(run(runner, "1", sleep=1000, **notes))
        pids = [await written(tmp_path / name) for name in ("pid", "child")]
        assert all(map(alive, pids))
    assert await gone(pids, timeout_s=0.5)
    assert (await running).status == "lost"
    assert (await run(runner, "2")).status == "lost"


@pytest.mark.parametrize("moment", range(6))
async def test_closing_in_the_middle_of_a_replacement_is_no_failure(tmp_path: Path, moment: int) -> None:
    """`close` cancels the old worker's shutdown at different moments."""
    async with pool(tmp_path, "agent:run") as runner:
        note = tmp_path / "pid"
        hung = await run(runner, "hung", timeout_s=0.1, sleep=1000, note=str(note))
        assert hung.status == "timeout"
        (worker,) = runner._leaving  # pyright: ignore[reportPrivateUsage]
        while worker._process.returncode is None:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
        for _ in range(moment):
            await asyncio.sleep(0)
    assert await gone([worker.pid])


PARENT = """
import asyncio, sys
from pathlib import Path
from lightningrl.config import AgentConfig
from lightningrl.runner.conformance import attempt
from lightningrl.runner.pool import WorkerPool

async def main(root, kind, task):
    how = {"command": ["sh", "-c", "echo $$ > command; sleep 1000"]} if kind == "command" else {"entry": kind}
    runner = WorkerPool(AgentConfig(**how, reward="agent:reward", workers=1), root=root)
    await runner.start()
    (root / "worker").write_text(str(runner._workers[0].pid))
    await runner.run(*attempt(task, timeout_s=1000))

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], {"sleep": 1000, "block": True, "child": sys.argv[1] + "/child"}))
"""


@pytest.mark.parametrize(
    ("kind", "started"),
    [("agent:run", "child"), ("agent:blocking", None), ("command", "command")],
    ids=["callable", "blocked", "command"],
)
async def test_when_the_parent_is_killed_all_processes_end(tmp_path: Path, kind: str, started: str | None) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), kind])
    try:
        pids = [await written(tmp_path / "worker")]
        if started:
            pids.append(await written(tmp_path / started))
        assert all(map(alive, pids))
    finally:
        parent.kill()
        parent.wait()
    assert await gone(pids)
