"""Chaos equals calm: workers and server are killed, stopped and cut off, and the weights are the same, bit for bit.

    python benchmarks/chaos.py                  200 faults, in as many runs as that takes
    python benchmarks/chaos.py --short          one run and its undisturbed twin, in about a minute
    python benchmarks/chaos.py --seed 7 --faults 40 --folder /tmp/chaos

The recipe is errands, with the embedded engine. First it is trained with local workers, then with three
`lightningrl worker` processes, undisturbed. Then it is trained again and again with such workers, each behind a proxy
of its own, and every one to three seconds one thing goes wrong:

    kill worker    SIGKILL; another one is started
    stop worker    SIGSTOP to the worker and its agents, for longer than a lease; then SIGCONT
    hold, lose,    the network between a worker and the server fails for a while (see storm/proxy.py)
    reset
    kill server    SIGKILL; it is started again with `--resume`
    turn clock     a worker's wall clock jumps by an hour, forwards or back (needs Debian's package `faketime`)

Compared are the SHA-256 of all tensors of the last checkpoint, and every call and reward that was learnt from. The
script exits with 1 if anything differs, if a rollout did not end exactly once, or if an agent's process is left over.
It writes faults.jsonl into the folder, prints a table, and with `--json FILE` writes the figures.
"""

import argparse
import asyncio
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from storm.cast import FAKETIME, LIGHTNINGRL, Scene, Server, Worker, free_port, wait_until_gone
from storm.proxy import Cut, Proxy
from storm.records import Taught, differences, digest, taught

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "errands"
WORKERS = 3
HOUR_S = 3600
KINDS = {
    "kill worker": 5,
    "stop worker": 4,
    "hold": 3,
    "lose": 3,
    "reset": 2,
    "kill server": 2,
    "turn clock": 3 if FAKETIME else 0,
}
"""Fault → weight."""
CUTS: tuple[Cut, ...] = ("hold", "lose", "reset")
MOST_CUT = 2
"""Workers that have no network at once. With none left, the run would only wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long it takes."""

    settings: Sequence[str]
    """Overrides of the recipe."""
    lease_s: int
    """Of an attempt."""
    cut_s: tuple[float, float]
    """Shortest and longest time without a network."""
    faults: int
    """Runs are repeated until so many were made. After that, a run ends without more."""
    limit_s: float = 900.0
    """Timeout of one run."""


SMALL = ("loop.steps=2", "loop.tasks_per_step=3", "loop.group_size=6", "loop.eval_every=0", "tasks.heldout=6")
LARGE = ("loop.steps=4", "loop.tasks_per_step=4", "loop.group_size=8", "loop.eval_every=0", "tasks.heldout=8")
SHORT = Size(settings=SMALL, lease_s=3, cut_s=(2.0, 8.0), faults=12, limit_s=300.0)
LONG = Size(settings=LARGE, lease_s=5, cut_s=(5.0, 90.0), faults=200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that went wrong."""

    at_s: float
    """Since the start of the run."""
    kind: str
    target: str
    seconds: float = 0.0
    """How long it lasted, or by how much the clock jumped."""


@dataclass(slots=True, kw_only=True)
class Take:
    """One run, and what came of it."""

    name: str
    seconds: float = 0.0
    sha256: str = ""
    faults: list[Fault] = field(default_factory=list[Fault])
    attempts: Counter[str] = field(default_factory=Counter[str])
    most: int = 0
    """Most attempts at one rollout."""
    problems: list[str] = field(default_factory=list[str])
    records: Taught | None = None

    def finish(self, run: Path, *, seconds: float) -> None:
        self.seconds = seconds
        self.sha256 = digest(run)
        self.records = asyncio.run(taught(run))
        self.attempts, self.most = self.records.attempts, self.records.most
        self.problems += [f"rollout `{name}` did not end exactly once" for name in self.records.broken]

    def compare(self, other: "Take") -> None:
        if self.sha256 != other.sha256:
            self.problems.append(f"weights differ from `{other.name}`: {self.sha256} and {other.sha256}")
        assert self.records is not None and other.records is not None
        self.problems += differences(self.records, other.records)


class Storm:
    """One run with remote workers, and up to `most` faults."""

    def __init__(self, scene: Scene, size: Size, *, chance: random.Random, most: int, say: Callable[[str], None]):
        self._scene, self._size, self._chance, self._most, self._say = scene, size, chance, most, say
        self._server = Server(scene)
        self._workers: list[Worker] = []
        self._healing: set[asyncio.Task[None]] = set()
        self._agents: set[int] = set()
        """All descendants of workers that were killed."""
        self._began = time.monotonic()
        self.faults: list[Fault] = []
        self.problems: list[str] = []

    async def run(self) -> None:
        proxies = [Proxy(self._scene.port) for _ in range(WORKERS)]
        try:
            self._server.start()
            await self._until(self._server.answers, what="the server answers")
            for number, proxy in enumerate(proxies):
                port = await proxy.listen()
                self._workers.append(Worker(f"w{number}", self._scene, proxy, port=port, concurrency=12))
                self._workers[-1].start()
            await self._until_over()
        finally:
            for task in self._healing:
                task.cancel()
            await asyncio.gather(*self._healing, return_exceptions=True)
            self._server.kill()
            for worker in self._workers:
                worker.proxy.heal()
                self._agents.update(worker.pids())
                await asyncio.to_thread(worker.end)
                await worker.proxy.close()
            left = await asyncio.to_thread(wait_until_gone, sorted(self._agents), timeout_s=10.0)
            self.problems += [f"process {pid} of a worker is left over" for pid in left]

    async def _until_over(self) -> None:
        """Until the server has ended by itself."""
        due = self._next()
        while (code := self._server.exit_code) is None:
            if time.monotonic() - self._began > self._size.limit_s:
                return self.problems.append(f"the run has not ended within {self._size.limit_s:g} s")
            for worker in self._workers:
                if worker.exit_code is not None and self._server.exit_code is None and self._server.answers():
                    await self._left(worker)
            if len(self.faults) < self._most and time.monotonic() > due:
                self._break()
                due = self._next()
            await asyncio.sleep(0.1)
        if code != 0:
            self.problems.append(f"the server ended with exit code {code}")

    async def _left(self, worker: Worker) -> None:
        """A worker has ended by itself. That is right only if the run is over: then the server ends soon, too."""
        deadline = time.monotonic() + 30.0
        while self._server.exit_code is None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        if self._server.exit_code is None:
            self.problems.append(f"worker `{worker.name}` ended by itself with exit code {worker.exit_code}")
            worker.start()

    def _next(self) -> float:
        return time.monotonic() + self._chance.uniform(1.0, 3.0)

    def _break(self) -> None:
        """Make one fault. Draws the same numbers whatever is possible at the moment."""
        kind = self._chance.choices(list(KINDS), list(KINDS.values()))[0]
        order = self._chance.sample(self._workers, WORKERS)
        long_s = self._size.lease_s + self._chance.uniform(1.0, 3.0)
        cut_s = math.exp(self._chance.uniform(*map(math.log, self._size.cut_s)))
        skew_s = self._chance.choice((-HOUR_S, 0, HOUR_S))
        if kind == "kill server":
            if self._server.answers():
                self._note(kind, "server")
                self._server.kill()
                self._server.start()
            return
        whole = [worker for worker in order if not worker.stopped and worker.proxy.cut is None]
        if not whole:
            return
        worker = whole[0]
        if kind in CUTS and sum(worker.proxy.cut is not None for worker in order) >= MOST_CUT:
            kind = "kill worker"
        match kind:
            case "kill worker":
                self._note(kind, worker.name)
                self._agents.update(worker.pids())
                worker.kill()
                worker.start()
            case "stop worker":
                self._note(kind, worker.name, long_s)
                worker.stop()
                self._later(long_s, worker.go_on)
            case "turn clock":
                self._note(kind, worker.name, skew_s)
                worker.set_clock(skew_s)
            case _:
                self._note(kind, worker.name, cut_s)
                worker.proxy.fail(next(cut for cut in CUTS if cut == kind))
                self._later(cut_s, worker.proxy.heal)

    def _note(self, kind: str, target: str, seconds: float = 0.0) -> None:
        fault = Fault(
            at_s=round(time.monotonic() - self._began, 2), kind=kind, target=target, seconds=round(seconds, 2)
        )
        self.faults.append(fault)
        self._say(f"{fault.at_s:7.1f} s  {kind:12} {target:7}" + (f" {seconds:.1f} s" if seconds else ""))

    def _later(self, seconds: float, mend: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            mend()

        task = asyncio.create_task(wait())
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _until(self, ready: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + 120.0
        while not ready():
            if time.monotonic() > deadline or self._server.exit_code is not None:
                raise RuntimeError(f"waited in vain until {what}; see {self._scene.folder / 'server.log'}")
            await asyncio.sleep(0.1)


def calm_take(folder: Path, size: Size) -> Take:
    """Train with local workers."""
    take, began = Take(name="calm, local workers"), time.monotonic()
    run = folder / "calm" / "run"
    run.parent.mkdir(parents=True)
    command = [*LIGHTNINGRL, "train", RECIPE / "recipe.toml", "--run-dir", run, *size.settings, "--json"]
    with (run.parent / "server.log").open("ab") as log:
        subprocess.run(list(map(str, command)), stdout=log, stderr=log, check=True, timeout=size.limit_s)
    take.finish(run, seconds=time.monotonic() - began)
    return take


def remote_take(name: str, folder: Path, size: Size, *, chance: random.Random, most: int) -> Take:
    """Train with workers that reach the server over a network."""
    take, began = Take(name=name), time.monotonic()
    folder.mkdir(parents=True)
    agent = [f"agent.lease_s={size.lease_s}"]
    settings = [*size.settings, "agent.workers=0"]
    scene = Scene(folder=folder, recipe=RECIPE, settings=settings, agent=agent, port=free_port())
    storm = Storm(scene, size, chance=chance, most=most, say=lambda line: print(line, file=sys.stderr, flush=True))
    asyncio.run(storm.run())
    take.faults, take.problems = storm.faults, storm.problems
    with (folder / "faults.jsonl").open("w") as log:
        log.writelines(json.dumps(asdict(fault)) + "\n" for fault in storm.faults)
    if (scene.run / "result.json").exists():
        take.finish(scene.run, seconds=time.monotonic() - began)
    else:
        take.problems.append(f"the run is not complete: see {folder}")
    return take


def play(folder: Path, size: Size, *, seed: int, short: bool) -> list[Take]:
    takes = [calm_take(folder, size)]
    if not short:
        takes.append(remote_take("calm, 3 remote workers", folder / "remote", size, chance=random.Random(0), most=0))
    chance, made = random.Random(seed), 0
    while made < size.faults:
        number = len(takes)
        name = f"chaos {number}"
        takes.append(remote_take(name, folder / f"chaos-{number}", size, chance=chance, most=size.faults - made))
        made += len(takes[-1].faults)
        if takes[-1].records is None:
            break
    for take in takes[1:]:
        if take.records is not None:
            take.compare(takes[0])
    return takes


def table(takes: Sequence[Take]) -> str:
    lines = [f"{'':24}{'seconds':>9}{'faults':>8}{'lost':>7}{'attempts':>10}{'most':>6}  weights"]
    for take in takes:
        lost, total = take.attempts["lost"], sum(take.attempts.values())
        cells = f"{take.seconds:>9.0f}{len(take.faults):>8}{lost:>7}{total:>10}{take.most:>6}"
        same = "the same" if take.sha256 == takes[0].sha256 else "DIFFERENT"
        lines.append(f"{take.name:24}{cells}  {take.sha256[:12]} {same}")
    kinds = Counter(fault.kind for take in takes for fault in take.faults)
    lines.append("faults: " + ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common()))
    return "\n".join(lines)


def figures(takes: Sequence[Take], *, seed: int) -> dict[str, Any]:
    rows = [
        {
            "name": take.name,
            "seconds": round(take.seconds, 1),
            "faults": Counter(fault.kind for fault in take.faults),
            "attempts": take.attempts,
            "most_attempts": take.most,
            "sha256": take.sha256,
            "problems": take.problems,
        }
        for take in takes
    ]
    return {"date": time.strftime("%Y-%m-%d"), "seed": seed, "runs": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=43, help="of the faults")
    parser.add_argument("--faults", type=int, help="at least so many, in as many runs as that takes")
    parser.add_argument("--folder", type=Path, help="keep all runs and logs here; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    arguments = parser.parse_args()
    size = SHORT if arguments.short else LONG
    if arguments.faults is not None:
        size = replace(size, faults=arguments.faults)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    takes = play(folder, size, seed=arguments.seed, short=arguments.short)
    print(table(takes))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures(takes, seed=arguments.seed), indent=1) + "\n", encoding="utf-8")
    problems = [f"{take.name}: {problem}" for take in takes for problem in take.problems]
    for problem in problems[:40]:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        print(f"error: {len(problems)} in all; records and logs are in {folder}", file=sys.stderr)
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
