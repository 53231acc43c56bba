"""Two gateways before one PostgreSQL, 2,000 agents, and one gateway is killed. Is anything lost that was acknowledged?

    python benchmarks/gateways.py [--agents 2000] [--rollouts 4000] [--json benchmarks/results/gateways.json]

Each gateway is a process with a script as its model. The agents are coroutines, 8 to a worker; each calls the model
three times, then finishes its attempt. After a third of the rollouts, one gateway gets SIGKILL. Its workers go to the
other one, and its attempts are lost when their leases pass, and tried again. In the end the store must hold every
answer that an agent got and every finish that was confirmed, and every rollout must have ended once. Exits with 1
otherwise.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from crowd.agents import Acknowledged, Agents

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from crowd.server import rollouts  # noqa: E402

from lightningrl.store import Records, open_records, open_store  # noqa: E402
from lightningrl.types import accepted_attempts  # noqa: E402
from tests.postgres import running  # noqa: E402

SIZE, CALLS = 8, 3
CHUNK = 200
"""Attempts read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured."""

    agents: int
    rollouts: int
    seconds: float
    calls_per_s: float
    """Acknowledged answers, of both gateways and of the one that was left."""
    moves: int
    """Workers that went to the other gateway."""
    lost: int
    """Attempts."""
    acknowledged_calls: int
    acknowledged_finishes: int
    problems: list[str]


class Gateway:
    """`crowd/gateway.py` in a process."""

    def __init__(self, folder: Path, store: str, name: str, *, lease_s: float) -> None:
        command = [sys.executable, ROOT / "benchmarks" / "crowd" / "gateway.py", folder, store, name, lease_s]
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


async def play(folder: Path, url: str, *, agents: int, count: int, lease_s: float, timeout_s: float) -> Figures:
    store = await open_store(url)
    await store.enqueue(rollouts("r", count, calls=CALLS))
    gateways = [Gateway(folder, url, name, lease_s=lease_s) for name in ("a", "b")]
    key = (folder / "worker.key").read_text().strip()
    urls = [gateway.url for gateway in gateways]
    crowd = Agents(urls, key, workers=agents // SIZE, size=SIZE, calls=CALLS, lease_s=lease_s)
    began = time.monotonic()
    working = asyncio.create_task(crowd.run())
    try:
        await _until(store, working, ended=count // 3, timeout_s=timeout_s)
        gateways[0].kill()
        await _until(store, working, ended=count, timeout_s=timeout_s)
        seconds = time.monotonic() - began
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        for gateway in gateways[1:]:
            gateway.close()
        await store.close()
    lost, problems = await check(url, crowd.seen)
    answers = sum(map(len, crowd.seen.calls.values()))
    return Figures(
        agents=agents,
        rollouts=count,
        seconds=round(seconds, 1),
        calls_per_s=round(answers / seconds, 1),
        moves=crowd.moves,
        lost=lost,
        acknowledged_calls=answers,
        acknowledged_finishes=len(crowd.seen.finished),
        problems=problems,
    )


async def _until(store: Records, working: "asyncio.Task[None]", *, ended: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        counts = await store.count()
        if counts.get("succeeded", 0) + counts.get("failed", 0) >= ended:
            return
        if working.done():
            working.result()
        assert time.monotonic() < deadline, f"not all rollouts have ended: {dict(counts)}"
        await asyncio.sleep(0.2)


async def check(url: str, seen: Acknowledged) -> tuple[int, list[str]]:
    """Number of lost attempts, and everything that is wrong."""
    store = await open_records(url)
    try:
        made = await store.rollouts()
        attempts = await store.attempts([rollout.id for rollout in made])
        kept = dict[str, set[str]]()
        asked = sorted(seen.calls)
        for start in range(0, len(asked), CHUNK):
            for call in await store.calls(asked[start : start + CHUNK]):
                kept.setdefault(call.attempt_id, set()).add(call.id)
    finally:
        await store.close()
    problems = [
        f"the answer `{call_id}` of attempt `{attempt_id}` is not in the store"
        for attempt_id, ids in seen.calls.items()
        for call_id in ids
        if call_id not in kept.get(attempt_id, set())
    ]
    statuses = {attempt.id: attempt.status for attempt in attempts}
    accepted = set(accepted_attempts(made))
    problems += [
        f"attempt `{attempt_id}` was finished, and is `{statuses[attempt_id]}`"
        for attempt_id in seen.finished
        if statuses[attempt_id] != "succeeded" or attempt_id not in accepted
    ]
    succeeded = Counter(attempt.rollout_id for attempt in attempts if attempt.status == "succeeded")
    for rollout in made:
        if rollout.status != "succeeded" or succeeded[rollout.id] != 1:
            problems.append(f"rollout `{rollout.id}` is `{rollout.status}` after {succeeded[rollout.id]} successes")
    problems += [f"attempt `{attempt.id}` still runs" for attempt in attempts if attempt.status == "running"]
    return sum(attempt.status == "lost" for attempt in attempts), problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--lease", type=float, default=15.0, help="of an attempt, in seconds")
    parser.add_argument("--timeout", type=float, default=600.0, help="in seconds")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends PostgreSQL and the gateways, too
    with running(durable=True) as postgres, tempfile.TemporaryDirectory() as folder:
        playing = play(
            Path(folder),
            postgres.url(),
            agents=arguments.agents,
            count=arguments.rollouts,
            lease_s=arguments.lease,
            timeout_s=arguments.timeout,
        )
        figures = asyncio.run(playing)
    for name, value in asdict(figures).items():
        if name != "problems":
            print(f"{name:24}{value}")
    if arguments.json is not None:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
        }
        arguments.json.write_text(json.dumps(about | asdict(figures), indent=1) + "\n", encoding="utf-8")
    for problem in figures.problems[:20]:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if figures.problems else 0


if __name__ == "__main__":
    sys.exit(main())
