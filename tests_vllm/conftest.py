"""A real vLLM server with a tiny model, started once per session. `make test-vllm` says which Python has vLLM."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightningrl.models.load import export_folder
from lightningrl.models.tiny import build_model, build_tokenizer
from tests.conftest import TEXTS, small_recipe  # noqa: F401  a fixture

START_S = 240.0
"""Most seconds until the server is up. Importing vLLM on a busy machine takes a minute."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = (
    *("--dtype", "float32"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--structured-outputs-config.backend", "guidance"),
    *("--max-model-len", "256"),
    *("--max-num-seqs", "32"),
    *("--max-loras", "2"),
    *("--max-lora-rank", "8"),
    "--no-enable-chunked-prefill",  # vLLM for CPUs dies when it reads a prompt with a seed in parts
    "--enable-lora",
    "--enforce-eager",
)
PYTHON = str(Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")).absolute())
"""Python of the environment that has vLLM."""
HEAD_SIZE = 32
"""The smallest head size of vLLM's attention on CPUs."""


@dataclass(frozen=True)
class Models:
    """Folders of the same architecture and tokenizer with different weights."""

    first: Path
    second: Path
    vocab_size: int


class GapWatcher:
    """Watches a run and keeps the logprob gap between engine and trainer of each step."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def doing(self, what: str, done: int = 0, total: int = 0) -> None: ...

    def voided(self, step: int, why: str) -> None: ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self.gaps.append(metrics["policy/logprob_gap"])

    def examined(self, exam: object) -> None: ...


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    tokenizer = build_tokenizer(TEXTS, vocab_size=300)
    folders = [tmp_path_factory.mktemp("models") / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 128}
        model = build_model(
            len(tokenizer), **sizes, head_size=HEAD_SIZE, eos_token_id=tokenizer.eos_token_id, seed=seed
        )
        export_folder(model, folder, tokenizer=tokenizer)
    return Models(*folders, vocab_size=len(tokenizer))


@pytest.fixture(scope="session")
def model_folder(models: Models) -> Path:
    """The model that the small recipe trains."""
    return models.first


@pytest.fixture(scope="session")
def url(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server."""
    with serving(models.first, tmp_path_factory.mktemp("vllm") / "log.txt") as url:
        yield url


@contextlib.contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """A server with `FLAGS`, and `flags` after them, while the block runs. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # the module, not the command `vllm`, which needs a package called `vllm`, not `vllm-cpu`
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *FLAGS,
        *flags,
    ]
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # workers that are left
        server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")
