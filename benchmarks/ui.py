"""How long does a viewer of the page wait, with 100,000 rollouts and 1,000,000 calls in the store?

The store: one training step of 500 rollouts with ten calls each is written through the verbs of the store, and its rows
are copied with other ids and rewards, 200 times. So texts repeat from step to step. One more step has two groups of
four rollouts, with 50 calls each that sample 4,000 tokens and whose prompts grow to 200,000.

Each round starts `lightningrl ui` anew, and asks it over HTTP as the page does. `first_…` are answers to the first such
question after the start. All figures are medians: the time from the question until the last byte of the answer, and
the CPU time of the server meanwhile, which other programs on the machine hardly change.

    python benchmarks/ui.py [--rounds 5] [--steps 200] [--json benchmarks/results/ui.json]
"""

import argparse
import asyncio
import http.client
import json
import os
import platform
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from store import QUESTION, Load, Writer, calls_of

from lightningrl.recipe import dump_config, load_config
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Reward, Rollout, Task

RECIPE = Path(__file__).parents[1] / "recipes" / "sql_langgraph" / "recipe.toml"
SHORT, LONG = Load("openai.chat", 50, 10, 500), Load("openai.chat", 4000, 50, 8)
AT_ONCE, REPEATS = 64, 3

Times: TypeAlias = tuple[float, float]
"""Seconds of wall-clock, seconds of CPU."""

ADDED: dict[str, dict[str, str]] = {
    "rollouts": {"seq": "rollouts", "changed": "changes"},
    "attempts": {"seq": "attempts", "rollout": "rollouts"},
    "calls": {"seq": "calls", "attempt": "attempts", "base": "calls"},
    "rewards": {"seq": "rewards", "attempt": "attempts"},
}
"""Table → column → the table by whose number of rows it differs from copy to copy."""


async def write_step(path: Path, step: int, load: Load, *, members: int) -> None:
    """One training step. Every fiftieth rollout fails."""
    store = await SQLiteStore.open(path)
    writer = Writer(step)
    tasks = [
        Task(id=f"train-{n}", input={"question": Writer(1000 + n).text(QUESTION)}, split="train")
        for n in range(load.attempts // members)
    ]
    group_of = [f"train-{step:05d}-{number // members:03d}" for number in range(load.attempts)]
    await store.enqueue(
        [
            Rollout(id=f"{group}-{number % members:02d}", group_id=group, task=tasks[number // members])
            for number, group in enumerate(group_of)
        ]
    )

    async def run(number: int, attempt: Attempt) -> None:
        for call in calls_of(load, attempt, number, task=number // members):
            await store.append(call)
        if number % 50 == 1:
            await store.finish(attempt.id, "failed", error=f"AgentError: ValueError: bad input {number % 7}\nTraceback")
            return
        reward = Reward(attempt_id=attempt.id, value=writer.random.randrange(11) / 10)
        await store.finish(attempt.id, "succeeded", rewards=[reward], output={"answer": 1})

    attempts = [attempt for _, attempt in await store.claim("worker-0", limit=load.attempts, lease_s=3600)]
    for start in range(0, load.attempts, AT_ONCE):
        await asyncio.gather(*(run(start + n, one) for n, one in enumerate(attempts[start : start + AT_ONCE])))
    await store.close()


def copy_step(path: Path, *, steps: int) -> None:
    """Make this many steps of the first one. Not durable, but fast."""
    connection = sqlite3.connect(path, isolation_level=None)
    for faster in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -200000"):
        connection.execute(f"PRAGMA {faster}")
    connection.execute("BEGIN")
    count = {table: connection.execute(f"SELECT max(seq) FROM {table}").fetchone()[0] for table in ADDED}
    count["changes"] = connection.execute("SELECT max(changed) FROM rollouts").fetchone()[0]
    for step in range(1, steps):
        for table, added in ADDED.items():
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            values = {name: f"{name} + {step * count[by]}" for name, by in added.items()}
            values["token"] = "randomblob(32)"
            values["value"] = "abs(random() % 11) / 10.0"
            if table == "rollouts":
                values |= {name: f"'train-{step:05d}' || substr({name}, 12)" for name in ("id", "group_id")}
            chosen = ", ".join(values.get(str(name), str(name)) for name in columns)
            connection.execute(f"INSERT INTO {table} SELECT {chosen} FROM {table} WHERE seq <= {count[table]}")
    connection.execute("COMMIT")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


def write_run(folder: Path, *, steps: int) -> Path:
    """The folder of a run with these many short steps, and a long one."""
    folder.mkdir()
    (folder / "config.toml").write_text(dump_config(load_config(RECIPE)))
    rows = [{"kind": "step", "step": step, "reward/mean": 0.5} for step in range(steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asyncio.run(write_step(folder / "store.sqlite", 0, SHORT, members=10))
    copy_step(folder / "store.sqlite", steps=steps)
    asyncio.run(write_step(folder / "store.sqlite", steps, LONG, members=4))
    return folder


class Viewer:
    """Asks as the page does."""

    def __init__(self, port: int, run: str, *, server: int) -> None:
        """`server`: id of its process."""
        self._threads = Path(f"/proc/{server}/task")
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._run = run
        self.port = port

    def ask(self, path: str = "") -> bytes:
        self._connection.request("GET", f"/api/runs/{self._run}{path}")
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        return body

    def timed(self, path: str) -> Times:
        began, cpu = time.perf_counter(), self._cpu()
        self.ask(path)
        return time.perf_counter() - began, self._cpu() - cpu

    def ready(self) -> Times:
        """Until the table has all rollouts."""
        began, cpu = time.perf_counter(), self._cpu()
        while not json.loads(self.ask("/rollouts?limit=1"))["complete"]:
            time.sleep(0.02)
        return time.perf_counter() - began, self._cpu() - cpu

    def _cpu(self) -> float:
        """Seconds that the threads of the server have run so far."""
        return sum(int(file.read_text().split()[0]) for file in self._threads.glob("*/schedstat")) / 1e9


@contextmanager
def serving(folder: Path) -> Iterator[Viewer]:
    """`lightningrl ui` in a process of its own."""
    command = [sys.executable, "-m", "lightningrl", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline())
            assert found is not None, "the server did not say its address"
            yield Viewer(int(found[1]), folder.name, server=server.pid)
        finally:
            server.terminate()


def questions(steps: int) -> dict[str, str]:
    """What is asked of a table that is ready."""
    middle = steps // 2
    return {
        "filter_status": "/rollouts?status=failed",
        "filter_reward": "/rollouts?reward=0..0.5&split=train",
        "filter_task": "/rollouts?task=train-7",
        "filter_step": f"/rollouts?step={middle}",
        "sort_reward": "/rollouts?sort=-reward",
        "sort_task": "/rollouts?sort=task&offset=50000",
        "search_slice": "/rollouts?text=no+such+words",
        "workers": "/workers",
        "rollout": f"/rollouts/train-{middle:05d}-003-02",
        "group": f"/groups/train-{middle:05d}-004",
        "long_rollout": f"/rollouts/train-{steps:05d}-000-00",
        "long_group": f"/groups/train-{steps:05d}-001",
        "long_call": f"/rollouts/train-{steps:05d}-000-00/calls/50",
    }


def measure_answers(folder: Path, *, steps: int) -> dict[str, list[Times]]:
    """Name → times of each answer, from one start of the server."""
    found: dict[str, list[Times]] = {}
    with serving(folder) as viewer:
        found["first_rows"] = [viewer.timed("/rollouts")]
        found["rest_of_table"] = [viewer.ready()]
        for name, path in questions(steps).items():
            first, *later = [viewer.timed(path) for _ in range(1 + REPEATS)]
            found[f"first_{name}"], found[name] = [first], later
    return found


MEASURES: tuple[Callable[..., dict[str, list[Times]]], ...] = (measure_answers,)
"""Each is called once a round."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of 500 rollouts each")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_run(Path(temporary) / "large", steps=arguments.steps)
        size = (folder / "store.sqlite").stat().st_size
        print(f"{arguments.steps * SHORT.attempts:,} rollouts, {size / 1e6:.0f} MB")
        for _ in range(arguments.rounds):
            for measure in MEASURES:
                for name, values in measure(folder, steps=arguments.steps).items():
                    found.setdefault(name, []).extend(values)
    results: dict[str, Any] = {"rollouts": arguments.steps * SHORT.attempts, "store_bytes": size}
    for name, values in found.items():
        wall, cpu = (round(1e3 * median(column), 1) for column in zip(*values, strict=True))
        results |= {f"{name}_ms": wall, f"{name}_cpu_ms": cpu}
        print(f"{name:22} {wall:10,.1f} ms {cpu:10,.1f} ms of CPU")
    if arguments.json:
        about = {
            "rounds": arguments.rounds,
            "load_average": os.getloadavg()[0],
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        }
        arguments.json.write_text(json.dumps(results | about, indent=2) + "\n")


if __name__ == "__main__":
    main()
