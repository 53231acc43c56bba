"""The cost of running an attempt: an agent that does nothing, in the pool, against the same agent in this process.

Then a program that does nothing, in a sandbox and without one, in turn.

python benchmarks/runner.py [attempts]
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lightningrl.config import AgentConfig
from lightningrl.runner.conformance import attempt
from lightningrl.runner.environment import addresses
from lightningrl.runner.pool import WorkerPool

AGENT = """
def run(task):
    return {"answer": task["x"]}

async def run_async(task):
    return {"answer": task["x"]}

def reward(task, output):
    return output["answer"]

async def reward_async(task, output):
    return output["answer"]

def zero(task, output):
    return 0
"""
CONCURRENCY = 64


async def attempts_per_second(root: Path, *, suffix: str, workers: int, count: int) -> float:
    agent = AgentConfig(
        entry=f"agent:run{suffix}", reward=f"agent:reward{suffix}", workers=workers, concurrency=CONCURRENCY
    )
    pool = WorkerPool(agent, root=root)
    await pool.start()
    numbers = iter(range(count))

    async def lane() -> None:
        for x in numbers:
            outcome = await pool.run(*attempt({"x": x}, name=str(x)))
            assert outcome.status == "succeeded" and outcome.rewards[0].value == x, outcome

    try:
        started = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(CONCURRENCY)))
        return count / (time.perf_counter() - started)
    finally:
        await pool.close()


async def in_process_per_second(*, count: int) -> float:
    """The baseline: the same work in threads of this process, without timeouts and attribution."""

    def both(x: int) -> float:
        return {"answer": x}["answer"]

    started = time.perf_counter()
    for _ in range(count // CONCURRENCY):
        await asyncio.gather(*(asyncio.to_thread(both, x) for x in range(CONCURRENCY)))
    return count / (time.perf_counter() - started)


async def programs_s(root: Path, *, count: int) -> dict[str, float]:
    """Median seconds of an attempt of `true`, in turn without and with a sandbox."""
    pools = {}
    for isolation in ("none", "bwrap"):
        agent = AgentConfig(command=["true"], reward="agent:zero", workers=1, isolation=isolation)
        pools[isolation] = WorkerPool(agent, root=root)
        await pools[isolation].start()
    taken: dict[str, list[float]] = {name: [] for name in pools}
    try:
        for i in range(count):
            for name, pool in pools.items():
                rollout, tried, _ = attempt({}, name=str(i))
                started = time.perf_counter()
                outcome = await pool.run(rollout, tried, addresses("http://127.0.0.1:9999", key=tried.token))
                taken[name].append(time.perf_counter() - started)
                assert outcome.status == "succeeded", outcome
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))
    return {name: statistics.median(times) for name, times in taken.items()}


def main(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "agent.py").write_text(AGENT)
        yardstick = asyncio.run(in_process_per_second(count=count))
        print(f"{'threads of this process':34} {yardstick:8.0f} /s")
        for label, suffix, workers in [
            ("def", "", 1),
            ("async def", "_async", 1),
            ("def", "", 2),
            ("async def", "_async", 2),
        ]:
            rate = asyncio.run(attempts_per_second(Path(folder), suffix=suffix, workers=workers, count=count))
            print(f"{f'pool, `{label}`, {workers} worker(s)':34} {rate:8.0f} /s   {rate / yardstick:.2f}×")
            print(json.dumps({"agent": label, "workers": workers, "attempts_per_s": rate, "ratio": rate / yardstick}))
        taken = asyncio.run(programs_s(Path(folder), count=max(5, count // 100)))
        plain, sandboxed = taken["none"] * 1e3, taken["bwrap"] * 1e3
        print(f"{'a program, without a sandbox':34} {plain:8.1f} ms")
        print(f"{'a program, in a sandbox':34} {sandboxed:8.1f} ms   {sandboxed - plain:+.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 6000)
