"""A thousand workers on one server: how many attempts per second, how long is a claim, and what do idle workers cost?

    python benchmarks/clients.py [--workers 1000] [--json benchmarks/results/clients.json]

The server is a process of its own, with its store on disk and no model. The workers are coroutines in this process;
they speak the protocol of `lightningrl worker` over as many connections. Their attempts take no time, so the figures
are those of claims and finishes alone.

    idle       CPU time of the server while all workers wait for work, over 30 s, as a share of one core
    handing    rollouts arrive one by one, 50 per second: from enqueued to received by one of the waiting workers
    rush       16 rollouts for each worker are queued, and all workers claim 8 at a time: attempts per second
    trivial    one rollout at a time, from enqueued to ended, through a real `lightningrl worker` on another host: a
               network namespace with an address of its own (as root; otherwise on the loopback)

Prints a table; with `--json`, writes it. Exits with 1 if a bar is missed: 5 % of a core idle, 50 ms for a rollout.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from crowd.namespace import Host, other_host
from crowd.workers import Crowd, percentile

HERE = Path(__file__).parent
SIZE = 8
"""Attempts of a worker at once."""
ROUNDS = 2
"""Rollouts for each place of a worker, in the rush."""
IDLE_BAR, TRIVIAL_BAR_MS = 0.05, 50.0


class Server:
    """`crowd/server.py` in a process."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        folder.mkdir(parents=True)
        command = [sys.executable, HERE / "crowd" / "server.py", folder, *overrides]
        self.process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ready = self._answer()
        self.port: int = ready["port"]
        self.key_file = Path(ready["key_file"])

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    async def ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return await asyncio.to_thread(self._answer)

    def cpu_s(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server has ended with exit code {self.process.wait()}")
        return json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured."""

    workers: int
    attempts: int
    """In the rush."""
    attempts_per_s: float
    """Claimed and finished."""
    claims_per_s: float
    """Claims with an answer; each brings up to `SIZE` attempts."""
    claim_ms: tuple[float, float]
    """Median and 99th percentile in the rush, when all workers claim at once."""
    finish_ms: tuple[float, float]
    server_cpu_ms: float
    """Of the server, for each attempt."""
    handing_ms: tuple[float, float]
    """Median and 99th percentile, from enqueued to received by a worker that waited."""
    idle_share: float
    """Of one core."""
    trivial_ms: tuple[float, float]
    """Median and 95th percentile, from enqueued to ended."""
    host: str
    """Where the worker of `trivial_ms` was."""


async def crowded(folder: Path, *, workers: int, idle_s: float) -> dict[str, Any]:
    server = Server(folder, "gateway.host=127.0.0.1")
    try:
        async with Crowd(f"http://127.0.0.1:{server.port}", server.key, count=workers, size=SIZE) as crowd:
            crowd.start()
            await asyncio.sleep(5.0)
            return {
                "idle_share": await idle(server, seconds=idle_s),
                "handing_ms": await handing(server, crowd),
                **await rush(server, crowd, count=workers * SIZE * ROUNDS),
            }
    finally:
        server.close()


async def idle(server: Server, *, seconds: float) -> float:
    before = server.cpu_s()
    await asyncio.sleep(seconds)
    return (server.cpu_s() - before) / seconds


async def handing(server: Server, crowd: Crowd, *, count: int = 200) -> tuple[float, float]:
    sent: list[float] = []
    crowd.times.given.clear()
    for number in range(count):
        sent.append(time.monotonic())
        await server.ask(enqueue=1, name=f"one{number}")
        await asyncio.sleep(0.02)
    await crowd.until(count)
    return _two([given - asked for asked, given in zip(sent, crowd.times.given, strict=True)], 0.99)


async def rush(server: Server, crowd: Crowd, *, count: int) -> dict[str, Any]:
    crowd.times.finishes.clear()
    ended, cpu = crowd.ended, server.cpu_s()
    began = await server.ask(enqueue=count, name="rush")
    await crowd.until(ended + count)
    seconds = time.monotonic() - began
    claims = [end - start for start, end in crowd.times.claims if start > began]  # others waited for the rush
    counts = await server.ask(count=True)
    assert counts == {"succeeded": ended + count}, counts
    return {
        "attempts": count,
        "attempts_per_s": count / seconds,
        "claims_per_s": len(claims) / seconds,
        "claim_ms": _two(claims, 0.99),
        "finish_ms": _two(crowd.times.finishes, 0.99),
        "server_cpu_ms": (server.cpu_s() - cpu) / count * 1000,
    }


async def trivial(folder: Path, host: Host, *, count: int) -> tuple[float, float]:
    server = Server(folder / "server", f"gateway.host={json.dumps(host.address)}")
    worker = _worker(server, host, folder=folder)
    try:
        await server.ask(one_by_one=5, name="warm")  # processes start, connections open
        return _two(await server.ask(one_by_one=count, name="one"), 0.95)
    finally:
        worker.terminate()
        worker.wait(timeout=30)
        server.close()


def _worker(server: Server, host: Host, *, folder: Path) -> subprocess.Popen[bytes]:
    command = [*host.inside, sys.executable, "-m", "lightningrl", "worker", f"http://{host.address}:{server.port}"]
    options = ["--key-file", server.key_file, "--recipe", HERE / "crowd" / "recipe", "--workers", "1", "--json"]
    return subprocess.Popen(
        [*command, *map(str, options)], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _two(seconds: Sequence[float], share: float) -> tuple[float, float]:
    """Median and a percentile, in milliseconds."""
    return round(median(seconds) * 1000, 2), round(percentile(seconds, share) * 1000, 2)


def measure(folder: Path, *, workers: int, idle_s: float) -> Figures:
    found = asyncio.run(crowded(folder / "crowd", workers=workers, idle_s=idle_s))
    with other_host() as host:
        there = asyncio.run(trivial(folder, host, count=100))
    return Figures(workers=workers, trivial_ms=there, host=host.name, **found)


def table(figures: Figures) -> str:
    rows = [
        ("idle", f"{figures.idle_share:.1%} of a core for {figures.workers} workers that wait"),
        ("handing", "{:.1f} ms from enqueued to received, 99 % within {:.1f} ms".format(*figures.handing_ms)),
        ("rush", f"{figures.attempts_per_s:.0f} attempts per second, in {figures.claims_per_s:.0f} claims per second"),
        ("", "claim: {:.1f} ms, 99 % within {:.1f} ms".format(*figures.claim_ms)),
        ("", "finish: {:.1f} ms, 99 % within {:.1f} ms".format(*figures.finish_ms)),
        ("", f"CPU of the server: {figures.server_cpu_ms:.2f} ms per attempt"),
        ("trivial", "{:.1f} ms, 95 % within {:.1f} ms; ".format(*figures.trivial_ms) + f"worker: {figures.host}"),
    ]
    return "\n".join(f"{name:10}{text}" for name, text in rows)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="clients-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    arguments = parser.parse_args()
    with _folder() as folder:
        figures = measure(folder, workers=arguments.workers, idle_s=arguments.idle_seconds)
    print(table(figures))
    if arguments.json is not None:
        about = {"date": time.strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "python": platform.python_version()}
        about["load_average"] = round(os.getloadavg()[0], 1)
        arguments.json.write_text(json.dumps(about | asdict(figures), indent=1) + "\n", encoding="utf-8")
    return 1 if figures.idle_share > IDLE_BAR or figures.trivial_ms[0] > TRIVIAL_BAR_MS else 0


if __name__ == "__main__":
    sys.exit(main())
