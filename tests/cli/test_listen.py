"""A training run with workers on other machines: whatever dies, its final weights are those of a run without any."""

import hashlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightningrl.cli.listen import listen_overrides, server_url
from lightningrl.config import GatewayConfig
from lightningrl.errors import UserError
from tests.conftest import SmallRecipe

SLOWER = ("def run(task):", "import time\n\ndef run(task):\n    time.sleep(0.3)")
SETTINGS = ("loop.steps=3", "tasks.heldout=2", "agent.lease_s=2")


@contextmanager
def started(recipe: SmallRecipe, *arguments: str, log: str) -> Iterator[subprocess.Popen[bytes]]:
    with (recipe.folder.parent / log).open("wb") as said:
        command = [sys.executable, "-m", "lightningrl", *arguments]
        running = subprocess.Popen(command, cwd=recipe.folder.parent, stdout=said, stderr=said)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def digest(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture
def recipe(small_recipe: SmallRecipe) -> SmallRecipe:
    small_recipe.rewrite_agent(lambda text: text.replace(*SLOWER))
    return small_recipe


def test_a_run_whose_worker_and_server_are_killed_ends_with_the_weights_of_a_calm_one(
    recipe: SmallRecipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    calm, stormy = (tmp_path_factory.mktemp(name) / "run" for name in ("calm", "stormy"))
    recipe.train("--run-dir", str(calm), *SETTINGS)
    url, listen = f"http://127.0.0.1:{(port := free_port())}", f"127.0.0.1:{port}"
    train = ("train", str(recipe.path), "--listen", listen, "--run-dir", str(stormy), "agent.workers=0", *SETTINGS)
    key, metrics = stormy / "worker.key", stormy / "metrics.jsonl"
    worker = ("worker", url, "--key-file", str(key), "--recipe", str(recipe.folder), "--concurrency", "3")

    def finished(step: int) -> bool:
        return metrics.exists() and f'"step": {step}' in metrics.read_text()

    with started(recipe, *train, log="server.log") as server:
        until(key.exists)
        with started(recipe, *worker, "--json", log="first.log") as first:
            until(lambda: '"began"' in (recipe.folder.parent / "first.log").read_text())
            with started(recipe, *worker, log="second.log"):
                until(lambda: finished(0))
                first.send_signal(signal.SIGKILL)
                until(lambda: finished(1))
                server.send_signal(signal.SIGKILL)
                server.wait()
                with started(recipe, *train, "--resume", "--json", log="resumed.log") as resumed:
                    assert resumed.wait(120) == 0, (recipe.folder.parent / "resumed.log").read_text()
    assert digest(stormy) == digest(calm)
    assert "connected again" in (recipe.folder.parent / "second.log").read_text()


def test_a_run_says_how_to_start_a_worker_and_that_it_waits_for_one(recipe: SmallRecipe, tmp_path: Path) -> None:
    port = free_port()
    folder = tmp_path / "out"
    options = ("--listen", f"127.0.0.1:{port}", "--run-dir", str(folder), "agent.workers=0", 'agent.labels=["gpu"]')
    log = recipe.folder.parent / "server.log"
    with started(recipe, "train", str(recipe.path), *options, log="server.log"):
        until(lambda: "waiting for workers with the labels gpu" in log.read_text())
        said = log.read_text()
    assert f"lightningrl worker http://127.0.0.1:{port} --key-file ~/worker.key --label gpu" in said
    assert str(folder / "worker.key") in said


def test_an_evaluation_without_a_process_for_agents_is_refused(recipe: SmallRecipe) -> None:
    done = recipe.cli("eval", str(recipe.path), "agent.workers=0")
    assert done.returncode == 2
    assert "`agent.workers` is `0`" in done.stderr and "hint: add `agent.workers=2" in done.stderr


@pytest.mark.parametrize("listen", ["8100", "host", "host:", ":0", "host:99999", "host:port", "host:²"])
def test_what_is_no_host_and_port_is_refused(listen: str) -> None:
    with pytest.raises(UserError, match="names no host and port"):
        listen_overrides(listen)


def test_a_host_and_a_port_become_settings() -> None:
    assert listen_overrides(None) == []
    assert listen_overrides("10.0.0.1:81") == ['gateway.host="10.0.0.1"', "gateway.port=81"]
    assert listen_overrides(":81") == ['gateway.host="0.0.0.0"', "gateway.port=81"]
    assert listen_overrides("[::1]:81") == ['gateway.host="::1"', "gateway.port=81"]


def test_workers_are_told_an_address_that_other_machines_can_use() -> None:
    def url(**settings: object) -> str:
        return server_url(GatewayConfig.model_validate(settings), port=81)

    assert url(host="10.0.0.1") == "http://10.0.0.1:81"
    assert url(host="::1") == "http://[::1]:81"
    assert url(host="host", certificate="cert.pem") == "https://host:81"
    assert url(public_url="https://train.example.org") == "https://train.example.org"
    assert "0.0.0.0" not in url(host="0.0.0.0")
