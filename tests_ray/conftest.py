"""A Ray cluster of several nodes on this machine, a run, and the command that starts workers for it."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "from_scratch"
SETTINGS = ("loop.steps=6", "loop.tasks_per_step=8", "agent.concurrency=64", "agent.lease_s=10", "tasks.heldout=16")
START_S = 120.0
ENDED_S = 240.0


@dataclass(kw_only=True)
class Nodes:
    """The cluster: a head on which no worker runs, and nodes with two cores each, which Ray only counts."""

    cluster: Cluster
    workers: list = field(default_factory=list)

    def add(self) -> None:
        self.workers.append(self.cluster.add_node(num_cpus=2))

    def kill(self) -> None:
        """Kill the raylet of the oldest node, as if its machine had died."""
        node = self.workers.pop(0)
        [raylet] = node.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": found})
    made = Nodes(cluster=cluster)
    try:
        made.add()
        made.add()
        yield made
    finally:
        cluster.shutdown()


@dataclass(kw_only=True)
class Run:
    """`lightningrl train` without agents of its own."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> int:
        """Steps and evaluations that are done."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text().count('"reward/mean"') if metrics.exists() else 0

    @property
    def going(self) -> bool:
        return self.process.poll() is None

    @property
    def weights(self) -> str:
        return hashlib.sha256((self.folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@contextlib.contextmanager
def started(folder: Path, *settings: str) -> Iterator[Run]:
    """A run in `folder/run`, once workers can connect to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_dir = folder / "run"
    arguments = ["train", str(RECIPE), "--run-dir", str(run_dir), "--listen", f"127.0.0.1:{port}", *settings]
    with ended(command(*arguments, log=folder / "train.log", cwd=folder)) as process:
        until(lambda: reachable(port) or process.poll() is not None, timeout_s=START_S)
        assert process.poll() is None, (folder / "train.log").read_text()
        yield Run(folder=run_dir, port=port, process=process)


@dataclass(kw_only=True)
class OnRay:
    """`lightningrl worker --on ray`."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.said.splitlines() if line.startswith("{")]

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def places(self) -> tuple[dict[str, int], int]:
        """How many workers run on each node, and how many wait for one."""
        told = [event for event in self.events if event["event"] == "workers"]
        return (told[-1]["nodes"], told[-1]["waiting"]) if told else ({}, 0)

    def ends(self) -> int:
        """Its exit code, after a signal."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def on_ray(run: Run, nodes: Nodes, *options: str, key: str = "") -> Iterator[OnRay]:
    """`key`: in place of the run's."""
    folder = run.folder.parent
    log = folder / f"ray-{len(list(folder.glob('ray-*')))}.log"
    key_file = run.folder / "worker.key"
    if key:
        key_file = folder / "another.key"
        key_file.write_text(key)
    arguments = ["worker", run.url, "--key-file", str(key_file), "--recipe", str(RECIPE), "--workers", "1", "--json"]
    arguments += ["--on", "ray", "--ray-address", nodes.cluster.address, *options]
    with ended(command(*arguments, log=log, cwd=folder)) as process:
        yield OnRay(process=process, log=log)


def command(*arguments: str, log: Path, cwd: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "lightningrl", *arguments], cwd=cwd, stdout=output, stderr=output, close_fds=True
        )


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def until(ready, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)
