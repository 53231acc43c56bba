"""The processes of a run: one server, and workers that reach it through proxies. Each can be killed or stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storm.proxy import Proxy

FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
"""Debian's package `faketime`. Without it, clocks are not changed."""
LIGHTNINGRL = [sys.executable, "-m", "lightningrl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all processes of a run share."""

    folder: Path
    """For the run's folder `run`, logs, and the workers' folders."""
    recipe: Path
    """Folder of the recipe."""
    settings: Sequence[str]
    """Overrides for the server."""
    agent: Sequence[str]
    """Overrides for the server and for the workers."""
    port: int
    """Of the server."""

    @property
    def run(self) -> Path:
        return self.folder / "run"


class Server:
    """`lightningrl train`. Started again, it resumes."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        scene = self._scene
        resume = ["--resume"] if (scene.run / "config.toml").exists() else []
        listen = ["--listen", f"127.0.0.1:{scene.port}", "--json"]
        command = [*LIGHTNINGRL, "train", scene.recipe / "recipe.toml", "--run-dir", scene.run, *listen, *resume]
        with (scene.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*map(str, command), *scene.settings, *scene.agent], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.starts += 1

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def answers(self) -> bool:
        """Whether it listens."""
        with socket.socket() as probe:
            probe.settimeout(0.2)
            return probe.connect_ex(("127.0.0.1", self._scene.port)) == 0

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Worker:
    """`lightningrl worker`, with a network and a clock of its own. Started again, it is another worker."""

    def __init__(self, name: str, scene: Scene, proxy: Proxy, *, port: int, concurrency: int) -> None:
        """`port`: the proxy's."""
        self.name = name
        self.proxy = proxy
        self._scene = scene
        self._port = port
        self._concurrency = concurrency
        self._folder = scene.folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._clock = self._folder / "clock"
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.skew_s = 0
        """The wall clock is this far ahead."""

    def start(self) -> None:
        scene = self._scene
        key = ["--key-file", str(scene.run / "worker.key"), "--recipe", str(scene.recipe), "--name", self.name]
        size = ["--concurrency", str(self._concurrency), "--workers", "1", "--json"]
        self.set_clock(self.skew_s)
        with (self._folder / "worker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*LIGHTNINGRL, "worker", f"http://127.0.0.1:{self._port}", *key, *size, *scene.agent],
                cwd=self._folder,
                env=os.environ | self._faked(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.stopped = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def pids(self) -> list[int]:
        """Of the worker and its agents; none if it has ended."""
        return family(self._process.pid) if self._process is not None and self.exit_code is None else []

    def set_clock(self, skew_s: int) -> None:
        """The wall clock of this worker and its agents jumps. The monotonic clock does not."""
        self.skew_s = skew_s
        draft = self._clock.with_suffix(".draft")
        draft.write_text(f"{skew_s:+d}\n")
        draft.rename(self._clock)

    def stop(self) -> None:
        """The whole machine stands still: the worker and its agents."""
        self.stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.stopped:
            self.stopped = False
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker itself. Its agents must end on their own."""
        if self._process is None:
            return
        self.go_on()
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Ask the worker to leave; kill it if it does not."""
        if self._process is None:
            return
        self.go_on()
        for _ in range(2):  # the second SIGTERM does not wait for attempts
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
                return
            except subprocess.TimeoutExpired:
                continue
        self._process.kill()
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _faked(self) -> dict[str, str]:
        if not FAKETIME:
            return {}
        settings = {"FAKETIME_TIMESTAMP_FILE": str(self._clock), "FAKETIME_CACHE_DURATION": "1"}
        return {"LD_PRELOAD": str(FAKETIME[0]), "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1", **settings}


def family(pid: int) -> list[int]:
    """A process and all its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_gone(pids: Sequence[int], *, timeout_s: float) -> list[int]:
    """Those that are still there after this time."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
