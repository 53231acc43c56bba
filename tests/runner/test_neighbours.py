"""Attempts share a worker, but one that misbehaves does not harm the others. Real processes, real failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import AgentConfig
from lightningrl.leases import StoreLeases
from lightningrl.runner import Outcome
from lightningrl.runner.conformance import attempt
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.runner.pool import WorkerPool
from lightningrl.store import open_store, wait
from lightningrl.types import Rollout, Task
from tests.runner.processes import written

AGENT = """
import asyncio, ctypes, os, resource, time

kept = []

async def run(task):
    do = task.get("do")
    if do == "block":
        await asyncio.sleep(0.2)
        await asyncio.gather(asyncio.create_task(blocks(task)))
    if do == "hold the GIL":
        await asyncio.sleep(0.2)
        ctypes.PyDLL(None).sleep(1000)
    if do == "exit":
        await asyncio.sleep(0.2)
        os._exit(3)
    if do == "segfault":
        await asyncio.sleep(0.2)
        ctypes.string_at(0)
    if do == "open files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        while True:
            kept.append(open("/dev/null"))
    if do == "keep files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        kept.extend(open("/dev/null") for _ in range(45))
    if do == "use memory":
        kept.append(bytearray(1 << 60))
    if do == "half a character":
        raise ValueError("\\udcff")
    if do == "print":
        print("x" * task["print"])
    await asyncio.sleep(task.get("sleep", 0.5))
    return os.getpid()

async def blocks(task):
    with open(task["note"], "w") as file:
        file.write("1")
    time.sleep(task["block"])

def reward(task, output):
    return 1
"""

LOG_LIMIT = 100_000


@asynccontextmanager
async def pool(
    root: Path, *, workers: int = 1, watchdog_s: float = 1.0, command: list[str] | None = None
) -> AsyncIterator[WorkerPool]:
    (root / "agent.py").write_text(AGENT)
    how: dict[str, Any] = {"command": command} if command else {"entry": "agent:run"}
    agent = AgentConfig(**how, reward="agent:reward", workers=workers, concurrency=8 * workers)
    runner = WorkerPool(agent, root=root, watchdog_s=watchdog_s, log_path=root / "agents.log", log_limit=LOG_LIMIT)
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(runner: WorkerPool, name: str, *, timeout_s: float = 60.0, **task: Any) -> Outcome:
    return await runner.run(*attempt(task, name=name, timeout_s=timeout_s))


async def neighbours(runner: WorkerPool, *, count: int = 7, **how: Any) -> list[Outcome]:
    return await asyncio.gather(*(run(runner, f"n{number}", **how) for number in range(count)))


async def test_an_attempt_that_blocks_the_loop_fails_and_the_others_are_lost(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        beside = asyncio.create_task(neighbours(runner, sleep=1000, timeout_s=3))
        blocked = await run(runner, "culprit", do="block", block=1000, note=str(tmp_path / "note"), timeout_s=3)
        assert blocked.status == "timeout" and blocked.error and "it blocks the event loop" in blocked.error
        lost = await beside
        assert {outcome.status for outcome in lost} == {"lost"}
        assert {outcome.error for outcome in lost} == {
            "attempt `attempt-culprit` blocked the event loop of their process"
        }
        again = await neighbours(runner)
        assert {outcome.status for outcome in again} == {"succeeded"}
        assert len({outcome.output for outcome in again}) == 1, (
            "they share a worker as before: none of them is a suspect"
        )


async def test_an_attempt_that_others_held_up_is_lost_and_not_timed_out(tmp_path: Path) -> None:
    async with pool(tmp_path, watchdog_s=30) as runner:
        culprit = asyncio.create_task(run(runner, "culprit", do="block", block=4, note=str(tmp_path / "note")))
        await asyncio.sleep(0)
        (late,) = await neighbours(runner, count=1, sleep=1000, timeout_s=2.5)
        assert (
            late.status == "lost"
            and late.error
            and late.error.startswith("other attempts in its process blocked the event loop for ")
        )
        assert (await culprit).status == "succeeded"


async def test_if_the_blocking_attempt_is_unknown_each_is_retried_alone(tmp_path: Path) -> None:
    async with pool(tmp_path, workers=2) as runner:
        held = asyncio.create_task(run(runner, "culprit", do="hold the GIL", timeout_s=2))
        runner._workers[1].retired = True  # all go to one worker
        beside = await neighbours(runner, count=2, sleep=1000, timeout_s=2)
        assert [outcome.status for outcome in [*beside, await held]] == ["lost"] * 3
        runner._workers[-1].retired = False
        again = await asyncio.gather(
            neighbours(runner, count=2), run(runner, "culprit", do="hold the GIL", timeout_s=2)
        )
        assert [outcome.status for outcome in again[0]] == ["succeeded"] * 2 and again[1].status == "timeout"
        assert len({outcome.output for outcome in again[0]}) == 2, "each had a worker of its own"


@pytest.mark.parametrize(("do", "how"), [("exit", "exit code 3"), ("segfault", "signal 11")])
async def test_a_crashing_attempt_is_found_and_the_others_succeed(tmp_path: Path, do: str, how: str) -> None:
    """Eight rollouts through store and dispatcher; one of them always ends its process."""
    store = await open_store("sqlite:///:memory:")
    tasks = [Task(id=str(number), input={"do": do} if number == 3 else {}, split="train") for number in range(8)]
    async with pool(tmp_path, workers=2) as runner:
        leases = StoreLeases(store)
        dispatcher = Dispatcher(leases=leases.of("w"), runner=runner, base_url="http://127.0.0.1:9", concurrency=16)
        running = asyncio.gather(leases.run(), dispatcher.run())
        await store.enqueue([Rollout(id=task.id, group_id="g", task=task, max_attempts=2) for task in tasks])
        ended = await wait(store, [task.id for task in tasks], timeout_s=100)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [rollout.id for rollout in ended if rollout.status != "succeeded"] == ["3"]
    tries: dict[str, list[str]] = {}
    for found in await store.attempts([task.id for task in tasks]):
        tries.setdefault(found.rollout_id, []).append(found.status)
        if found.status == "failed":
            assert found.error == f"AgentError: the worker process died ({how}), also when the attempt ran alone"
    await store.close()
    assert tries.pop("3") == ["lost", "failed", "failed"]
    assert all(statuses in (["succeeded"], ["lost", "succeeded"]) for statuses in tries.values()), tries


@pytest.mark.parametrize(
    ("do", "said"), [("open files", "OSError: [Errno 24] Too many open files"), ("use memory", "MemoryError")]
)
async def test_a_worker_that_has_run_out_of_files_or_memory_is_replaced(tmp_path: Path, do: str, said: str) -> None:
    async with pool(tmp_path) as runner:
        before = (await run(runner, "before")).output
        lost = await run(runner, "culprit", do=do)
        assert lost.status == "lost" and lost.error and said in lost.error
        after = await neighbours(runner)
        assert [outcome.status for outcome in after] == ["succeeded"] * 7 and before not in [
            outcome.output for outcome in after
        ]
        failed = await run(runner, "culprit", do=do)
        assert (
            failed.status == "failed"
            and failed.error
            and f"{said}" in failed.error
            and "also when the attempt ran alone" in failed.error
        )


async def test_a_worker_that_keeps_most_of_its_files_open_is_replaced_before_it_runs_out(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        leaky = await run(runner, "leaky", do="keep files")
        assert leaky.status == "succeeded"
        assert (await run(runner, "after")).output != leaky.output


@pytest.mark.parametrize("where", ["", ">&2"])
async def test_endless_output_of_a_program_stops_at_its_own_end(tmp_path: Path, where: str) -> None:
    flooding = f'echo $$ > "$PWD/flood"; exec yes {where}'
    script = f'case "$LIGHTNINGRL_TASK" in *flood*) {flooding};; *) sleep 0.5; echo fine;; esac'
    async with pool(tmp_path, command=["sh", "-c", script]) as runner:
        beside, flood = await asyncio.gather(
            neighbours(runner, count=3), run(runner, "flood", do="flood", timeout_s=3 if where else 60)
        )
        assert [outcome.output for outcome in beside] == ["fine"] * 3
        assert flood.status == ("timeout" if where else "failed")
        assert await written(tmp_path / "flood")


async def test_an_error_that_is_not_unicode_is_reported_and_harms_no_other_attempt(tmp_path: Path) -> None:
    async with pool(tmp_path) as runner:
        beside, failed = await asyncio.gather(neighbours(runner), run(runner, "half", do="half a character"))
        assert (failed.status, failed.error and failed.error.splitlines()[0]) == (
            "failed",
            "AgentError: ValueError: \\udcff",
        )
        assert {outcome.status for outcome in beside} == {"succeeded"}


async def test_endless_output_of_a_function_does_not_fill_the_disk(tmp_path: Path) -> None:
    log, before = tmp_path / "agents.log", tmp_path / "agents.log.1"
    async with pool(tmp_path) as runner:
        beside, _ = await asyncio.gather(neighbours(runner), run(runner, "talkative", do="print", print=3 * LOG_LIMIT))
        assert [outcome.status for outcome in beside] == ["succeeded"] * 7
        async with asyncio.timeout(60):
            while log.stat().st_size > LOG_LIMIT or not before.exists():
                await asyncio.sleep(0.05)
        assert (await run(runner, "again", do="print", print=10)).status == "succeeded"
    assert log.read_text() == "[attempt-again] " + "x" * 10 + "\n", "the log was emptied"
    assert before.stat().st_size == LOG_LIMIT
