"""The commands for Slurm, systemd and Kubernetes really start a worker, and SIGTERM drains it."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from lightningrl.config import AgentConfig
from lightningrl.remote.digest import copy_of
from lightningrl.store import wait
from tests.deploy.test_systemd import PROGRAM, unit
from tests.docs.blocks import ROOT
from tests.workers import KEY, Server

Start: TypeAlias = Callable[[Path, str], tuple[list[str], dict[str, str]]]
"""From a folder and a server's URL to a command and its environment."""
SLURM = ROOT / "deploy" / "slurm" / "workers.sbatch"
LIGHTNINGRL = str(Path(sys.executable).with_name("lightningrl"))
AGENT = AgentConfig(command=["sh", "-c", "cat > /dev/null; sleep 1; echo done"], reward="grader:reward")
RECIPE = f"""
name = "deployed"
agent.command = {AGENT.command}
agent.reward = "grader:reward"
tasks.source = "tasks.jsonl"
model.path = "model"
"""


async def status(server: Server, name: str) -> str:
    [ended] = await wait(server.store, [name], timeout_s=60)  # a worker starts slowly on a busy machine
    return ended.status


def slurm(folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    job = {"SLURM_JOB_NAME": "job", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "1"}
    given = {"SERVER": url, "KEY_FILE": str(folder / "worker.key"), "RECIPE": str(folder / "recipe")}
    return ["bash", str(SLURM)], {**job, **given}


def systemd(folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    values = {"SERVER": url, "RECIPE": str(folder / "recipe"), "CREDENTIALS_DIRECTORY": str(folder), "CONCURRENCY": "4"}
    command = re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], unit()["Service"]["ExecStart"])
    return shlex.split(command.replace("%H", "job-17-3").replace(PROGRAM, LIGHTNINGRL)), {}


def kubernetes(folder: Path, url: str) -> tuple[list[str], dict[str, str]]:
    deployment = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "workers.yaml").read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    places = {
        "http://lightningrl:8100": url,
        "/run/secrets/lightningrl": str(folder),
        "=/recipe": f"={folder}/recipe",
        "$(POD_NAME)": "job-17-3",
    }
    words = shlex.join(container["args"])
    for name, value in places.items():
        assert name in words
        words = words.replace(name, value)
    return shlex.split(words), {}


@pytest.mark.parametrize("start", [slurm, systemd, kubernetes], ids=lambda start: start.__name__)
async def test_a_worker_starts_works_and_drains(start: Start, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "recipe.toml").write_text(RECIPE)
    (recipe / "grader.py").write_text("def reward(task, output):\n    return 1\n")
    (tmp_path / "worker.key").write_text(f"{KEY}\n")
    server = Server(path=tmp_path / "store.sqlite", port=0, copy=copy_of(AGENT, root=recipe))
    async with server.up():
        command, env = start(tmp_path, server.url)
        path = f"{Path(LIGHTNINGRL).parent}{os.pathsep}{os.environ['PATH']}"
        worker = subprocess.Popen(
            command, cwd=tmp_path, env={"PATH": path, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            await server.enqueue("first")
            assert await status(server, "first") == "succeeded"
            [connected] = server.workers.roster.all()
            assert connected.hello.name == "job-17-3"
            await server.enqueue("second")
            while not await server.store.attempts(["second"]):
                await asyncio.sleep(0.05)
            worker.send_signal(signal.SIGTERM)
            assert await status(server, "second") == "succeeded"
            assert await asyncio.to_thread(worker.wait, 60) == 0
        finally:
            worker.kill()
            said, _ = worker.communicate()
    assert b"2 succeeded, 0 failed, 0 lost" in said, said


def test_the_slurm_script_is_sound() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True, timeout=10)
    done = subprocess.run(["bash", SLURM], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=10)
    assert done.returncode == 1 and "SERVER: the address of the server" in done.stderr
    options = re.findall(r"^#SBATCH (--[a-z-]+)", SLURM.read_text(), re.MULTILINE)
    assert {"--array", "--signal", "--requeue", "--cpus-per-task", "--mem", "--time"} <= set(options)
