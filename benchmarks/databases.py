"""SQLite and PostgreSQL side by side: what does a verb of the store cost in each?

Both run durable (`synchronous=FULL`, `fsync=on`) on the same disk, by turns, in one process. PostgreSQL is reached
through a socket of this machine. The calls are those of `benchmarks/store.py`: 50 tokens, conversations of eight.

append     64 agents at once, each waits for its call to be durable; calls per second, CPU of this process per call
latency    one agent alone: milliseconds until its call is durable, median
claim      milliseconds for a claim of 8 attempts out of 2,000 queued rollouts, median and 99th percentile
finish     64 at once: attempts per second
wake       milliseconds from a commit of one process to a `changes` of another that waits for it, median
disk       bytes of the database per call, indexes included

    python benchmarks/databases.py [--rounds 3] [--json benchmarks/results/databases.json]
"""

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from store import GROUP, Load, begin, calls_of

from lightningrl.store import Store, open_store
from lightningrl.types import Attempt, Call, Reward, Rollout, Task

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.postgres import running

LOAD = Load("openai.chat", 50, 8, 256)
AT_ONCE, QUEUED, CLAIM, ALONE, WAKES = 64, 2000, 8, 40, 40


async def measure(url: str, folder: Path | None) -> dict[str, float]:
    """`folder`: of the SQLite file; None: the URL is PostgreSQL's."""
    store, other = await open_store(url), await open_store(url)
    found = await appends(store)
    found["disk_bytes_per_call"] = await disk(store, folder) / (LOAD.turns * LOAD.attempts)
    found |= await claims(store)
    found["wake_ms"] = await wakes(store, other)
    await store.close()
    await other.close()
    return found


async def appends(store: Store) -> dict[str, float]:
    attempts = await begin(store, LOAD)
    prepared = [list(calls_of(LOAD, a, n, task=n // GROUP)) for n, a in enumerate(attempts)]

    async def lane(calls: list[Call]) -> None:
        for call in calls:
            await store.append(call)

    alone: list[float] = []
    for call in [call for calls in prepared[: ALONE // LOAD.turns] for call in calls]:
        began = time.perf_counter()
        await store.append(call)
        alone.append(time.perf_counter() - began)
    rest, seconds, cpu = prepared[ALONE // LOAD.turns :], 0.0, 0.0
    for start in range(0, len(rest), AT_ONCE):
        wall, spent = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(lane, rest[start : start + AT_ONCE]))
        seconds += time.perf_counter() - wall
        cpu += time.process_time() - spent
    finished = await finishes(store, attempts)
    count = len(rest) * LOAD.turns
    return {
        "append_per_s": count / seconds,
        "append_cpu_us": cpu / count * 1e6,
        "append_alone_ms": median(alone) * 1e3,
        "finish_per_s": finished,
    }


async def finishes(store: Store, attempts: list[Attempt]) -> float:
    began = time.perf_counter()
    for start in range(0, len(attempts), AT_ONCE):
        batch = attempts[start : start + AT_ONCE]
        ends = [
            store.finish(a.id, "succeeded", rewards=[Reward(attempt_id=a.id, value=0.5)], output={"answer": 1})
            for a in batch
        ]
        await asyncio.gather(*ends)
    return len(attempts) / (time.perf_counter() - began)


async def claims(store: Store) -> dict[str, float]:
    await store.enqueue(rollouts("queued", QUEUED))
    took: list[float] = []
    for _ in range(QUEUED // CLAIM):
        began = time.perf_counter()
        assert len(await store.claim("worker-0", limit=CLAIM, lease_s=600)) == CLAIM
        took.append(time.perf_counter() - began)
    return {"claim_ms": median(took) * 1e3, "claim_p99_ms": sorted(took)[int(0.99 * len(took))] * 1e3}


async def wakes(store: Store, other: Store) -> float:
    took: list[float] = []
    for number in range(WAKES):
        cursor = (await other.changes()).cursor
        waiting = asyncio.create_task(other.changes(cursor, timeout_s=10))
        await asyncio.sleep(0.03)
        await store.enqueue(rollouts(f"wake{number}", 1))
        began = time.perf_counter()
        await waiting
        took.append(time.perf_counter() - began)
    return median(took) * 1e3


def rollouts(name: str, count: int) -> list[Rollout]:
    task = Task(id=name, input={"question": "why?"}, split="train")
    return [Rollout(id=f"{name}/{n}", group_id=name, task=task) for n in range(count)]


async def disk(store: Any, folder: Path | None) -> float:
    if folder is not None:
        checkpoint = sqlite3.connect(folder / "s.db")
        checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        checkpoint.close()
        return float((folder / "s.db").stat().st_size)
    size = "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
    return float((await store._reader.run(lambda c: c.execute(f"{size} AND relkind = 'r'").fetchone()))[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sides: dict[str, list[dict[str, float]]] = {"sqlite": [], "postgresql": []}
    with running(durable=True) as server:
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as folder:
                sides["sqlite"].append(asyncio.run(measure(f"sqlite://{folder}/s.db", Path(folder))))
            sides["postgresql"].append(asyncio.run(measure(server.url(), None)))
    found = {side: {name: median(row[name] for row in rows) for name in rows[0]} for side, rows in sides.items()}
    ratios = {name: value / found["sqlite"][name] for name, value in found["postgresql"].items()}
    print(f"{'':22} {'SQLite':>10} {'PostgreSQL':>10} {'ratio':>7}")
    for name, ratio in ratios.items():
        print(f"{name:22} {found['sqlite'][name]:10.2f} {found['postgresql'][name]:10.2f} {ratio:7.2f}")
    if arguments.json:
        about = {"machine": platform.machine(), "load_average": os.getloadavg()[0], "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps({**found, "ratio": ratios, **about}, indent=2) + "\n")


if __name__ == "__main__":
    main()
