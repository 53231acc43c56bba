"""A real SkyRL server on the CPU: its processes, its folder, and how it dies.

The server is a uv that starts an HTTP server, which starts a second uv with the engine. The HTTP server answers long
before the engine does, so readiness is an adapter that the engine has made.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "recipes" / "from_scratch" / "warmstart"
START_S = 240.0
ENDED_S = 30.0
NEAR = 1e-4
"""Most nats between log-probabilities of equal weights. Measured: 5e-6."""
BACKEND = {
    "max_lora_adapters": 8,
    "max_lora_rank": 16,
    "train_micro_batch_size": 8,
    "sample_max_num_sequences": 16,
}


@dataclass(kw_only=True)
class Server:
    """A server for one model. `kill` and `start` may follow each other: its folder has what it remembers."""

    folder: Path
    model: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return (self.folder / "server.log").read_text(errors="replace")

    def start(self) -> None:
        """Returns once the engine has made an adapter."""
        assert self.process is None, "it is running already"
        self.folder.mkdir(parents=True, exist_ok=True)
        venv = Path(os.environ.get("SKYRL_VENV", ROOT / ".venv-skyrl")).absolute()
        path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        uv = shutil.which("uv", path=path)
        assert uv is not None and (venv / "bin" / "python").exists(), f"no server in {venv}: run `make test-tinker`"
        (self.folder / "tmp").mkdir(exist_ok=True)
        environ = {
            **os.environ,
            "VIRTUAL_ENV": str(venv),
            "PATH": path,
            "HF_HUB_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "UV_OFFLINE": "1",
            "UV_NO_CACHE": "1",
            "TMPDIR": str(self.folder / "tmp"),
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(uv), cwd=self.folder, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert self.process.poll() is None, self.said[-4000:]
            assert time.monotonic() < deadline, f"not ready within {START_S} s: {self.said[-4000:]}"
            time.sleep(0.5)

    def _command(self, uv: str) -> list[str]:
        command = [uv, "run", "--no-project", "--active", "python", "-m", "skyrl.tinker.api"]
        command += ["--base-model", str(self.model), "--backend", "jax", "--backend-config", json.dumps(BACKEND)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--checkpoints-base", str(self.folder / "kept")]
        command += ["--session-timeout-sec", "60", "--session-cleanup-interval-sec", "5"]
        return [*command, "--database-url", f"sqlite:///{self.folder / 'tinker.db'}"]

    def _ready(self) -> bool:
        try:
            session = self._asked("create_session", {"tags": [], "sdk_version": "0.24.1"})["session_id"]
            wanted = {"session_id": session, "base_model": str(self.model), "lora_config": {"rank": 1}}
            made = self._asked("create_model", wanted)
            self._asked("retrieve_future", {"request_id": made["request_id"]})
            self._asked("unload_model", {"model_id": made["model_id"]})
        except httpx.TransportError:
            return False
        return True

    def _asked(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/api/v1/{what}", json=body, timeout=START_S)
        answer.raise_for_status()
        return answer.json()

    def kill(self) -> None:
        """kill -9 of all its processes."""
        if self.process is None:
            return
        group, self.process = self.process, None
        os.killpg(group.pid, signal.SIGKILL)
        group.wait(ENDED_S)
        deadline = time.monotonic() + ENDED_S
        while _exists(group.pid):
            assert time.monotonic() < deadline, f"processes of the group {group.pid} remain"
            time.sleep(0.05)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
