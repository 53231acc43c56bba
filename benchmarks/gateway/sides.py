"""Two gateways with one interface: start it before an upstream, create attempts, finish them, read the cost.

Each side runs in its own process, started as its users start it. Costs come from /proc: CPU and memory of the process
with its threads and children.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
KEY = "agl-benchmark"

Attempts: TypeAlias = list[tuple[str, str, str]]
"""(id, base URL with `/v1`, API key) of each attempt."""


class Process:
    """A program that prints one line when it is ready."""

    def __init__(self, command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd, env=env
        )
        self.pid = self._process.pid

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"`{' '.join(map(str, self._process.args))}` has ended with code {self._process.wait()}")  # type: ignore[arg-type]
        return line

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self.line())

    def close(self, *, terminate: bool = False) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        if terminate:
            self._process.terminate()
        self._process.wait(timeout=60)
        self._process.stdout.close()


class Upstream:
    """The scripted vLLM."""

    def __init__(self, tokenizer: Path) -> None:
        self._process = Process([sys.executable, str(HERE / "upstream.py"), str(tokenizer)])
        self.url = f"http://127.0.0.1:{int(self._process.line())}"

    def pace(self, *, step_s: float = 0.0, delay_s: float = 0.0) -> None:
        """Seconds per token, and seconds before the first one."""
        _post(f"{self.url}/pace", {"step_s": step_s, "delay_s": delay_s})

    def counts(self) -> dict[str, int]:
        return _get(f"{self.url}/counts")

    def close(self) -> None:
        self._process.close()


@dataclass(frozen=True, slots=True)
class Cost:
    """Resources that a process has used so far."""

    cpu_s: float
    rss: int
    """Bytes."""


def cost(pid: int) -> Cost:
    # utime, stime, and those of children that have ended
    cpu = sum(int(tick) for p in [pid, *_descendants(pid)] for tick in _stat(p)[11:15]) / TICKS
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in [pid, *_descendants(pid)])
    return Cost(cpu, pages * os.sysconf("SC_PAGE_SIZE"))


def peak_rss(pid: int) -> int:
    """The process's largest RSS so far, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [p for child in children for p in (child, *_descendants(child))]


class Side(Protocol):
    name: str
    pid: int
    streams: bool
    """Whether it supports streams."""

    def attempts(self, count: int) -> Attempts: ...

    def finish(self, attempts: Attempts) -> None:
        """Mark the attempts as succeeded."""
        ...

    def close(self) -> None: ...


class Ours:
    """`create_app` with a SQLite store on disk, `VLLMEngine` and uvicorn, as `serve.py` assembles them."""

    name, streams = "lightningrl", True

    def __init__(self, folder: Path, *, tokenizer: Path, upstream: str) -> None:
        self.store = folder / "store.sqlite"
        self._process = Process([sys.executable, str(HERE / "ours.py"), str(folder), str(tokenizer), upstream])
        self._url = self._process.line().strip()
        self.pid = self._process.pid

    def attempts(self, count: int) -> Attempts:
        return [(attempt_id, f"{self._url}/v1", token) for attempt_id, token in self._process.ask({"attempts": count})]

    def finish(self, attempts: Attempts) -> None:
        self._process.ask({"finish": [attempt_id for attempt_id, _, _ in attempts]})

    def close(self) -> None:
        self._process.close()


class Peer:
    """`agl-server` of `agentlightning`, started as in its docs.

    It always asks for token ids, by default for logprobs, and keeps all records in memory.
    """

    name, streams = "agentlightning", False

    def __init__(self, folder: Path, *, python: Path, upstream: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        self._url, self._folder = f"http://127.0.0.1:{port}", folder
        settings = [
            "host=127.0.0.1",
            f"port={port}",
            f"key={KEY}",
            "default_proxy.model_name=bench",
            f"hydra.run.dir={folder}",
        ]
        with open(os.devnull, "w") as nowhere:  # the cheapest place for its log of requests
            command = [str(python), "-m", "agentlightning.server", *settings]
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=nowhere, stderr=nowhere
            )
        self.pid = self._process.pid
        self._await()
        _post(f"{self._url}/api/models", [{"model": "bench", "endpoint": f"{upstream}/v1"}])

    def attempts(self, count: int) -> Attempts:
        found = _post(f"{self._url}/api/rollouts", [{"input": {"data_id": str(number)}} for number in range(count)])
        ids = [rollout["rollout_id"] for rollout in found]
        for rollout_id in ids:
            self._patch(rollout_id, "running")
        return [(i, f"{self._url}/proxy/rollout/{i}/attempt/0/mode/train/openai/v1", KEY) for i in ids]

    def finish(self, attempts: Attempts) -> None:
        """Mark them as succeeded and delete them, as its trainer does after reading them."""
        for rollout_id, _, _ in attempts:
            self._patch(rollout_id, "succeeded")
            _request("DELETE", f"{self._url}/api/rollouts/{rollout_id}", None)

    def recorded(self, rollout_id: str) -> list[dict[str, Any]]:
        """Token ids and logprobs of the rollout's calls, as its trainer reads them."""
        return [event["data"] for event in _get(f"{self._url}/api/rollouts/{rollout_id}/events?format=triplet")]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)

    def _patch(self, rollout_id: str, state: str) -> None:
        _request("PATCH", f"{self._url}/api/rollouts/{rollout_id}", {"status": {"state": state}})

    def _await(self) -> None:
        until = time.monotonic() + 60
        while True:
            try:
                _get(f"{self._url}/healthz")
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("agl-server did not start; try it by hand") from None
                time.sleep(0.1)


def _get(url: str) -> Any:
    return _request("GET", url, None)


def _post(url: str, body: Any) -> Any:
    return _request("POST", url, body)


def _request(method: str, url: str, body: Any) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else None
