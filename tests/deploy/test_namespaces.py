"""Machines as network namespaces: the server, a worker that can reach nothing else, and an agent behind the worker."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SERVER, WORKER, AGENT = "10.83.1.1", "10.83.1.2", "10.83.2.2"
RELAY = "10.83.2.1"
"""The worker's address on the side of the agent."""
PROGRAM = f"""
import json, os, socket, sys, urllib.request

def reachable(host, port):
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True

task = json.load(sys.stdin)
body = {{"model": "policy", "messages": [{{"role": "user", "content": task["question"]}}], "max_tokens": 4}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}},
)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
with opener.open(request, timeout=30) as response:
    answered = len(json.load(response)["choices"])
addresses = [line.split()[3] for line in os.popen("ip -4 -o address show scope global")]
print(json.dumps({{"answered": answered, "server": reachable("{SERVER}", 8100), "addresses": addresses}}))
"""
GRADER = """
def reward(task, output):
    return 1
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def usable() -> bool:
    name = f"lrl-{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    if made:
        ip("netns", "delete", name)
    return made


@contextmanager
def machines() -> Iterator[tuple[str, str, str]]:
    """server --- worker --- agent: each knows its neighbours, and forwards nothing."""
    names = tuple(f"lrl-{os.getpid()}-{role}" for role in ("server", "worker", "agent"))
    server, worker, agent = names
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for left, right, here, there in ((server, worker, SERVER, WORKER), (worker, agent, RELAY, AGENT)):
            to_right, to_left = f"to-{right[-6:]}", f"to-{left[-6:]}"
            ip("-n", left, "link", "add", to_right, "type", "veth", "peer", "name", to_left, "netns", right)
            for name, device, address in ((left, to_right, here), (right, to_left, there)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", device)
                ip("-n", name, "link", "set", device, "up")
        yield server, worker, agent
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def lay_out(folder: Path, agent: str) -> Path:
    """A recipe whose agent is a program in the namespace `agent`."""
    recipe = folder / "recipe"
    recipe.mkdir()
    (recipe / "agent.py").write_text(PROGRAM)
    (recipe / "grader.py").write_text(GRADER)
    rows = [{"input": {"question": str(n)}, "split": split} for n in range(4) for split in ("train", "heldout")]
    (recipe / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["ip", "netns", "exec", agent, sys.executable, str(recipe / "agent.py")]
    (recipe / "recipe.toml").write_text(f"""
name = "machines"
agent = {{ command = {command}, reward = "grader:reward", workers = 0, relay_host = "{RELAY}" }}
tasks = {{ source = "tasks.jsonl", heldout = 2 }}
model.path = "{ROOT / "recipes" / "from_scratch" / "warmstart"}"
engine = {{ slots = 8, max_length = 128 }}
loop = {{ steps = 1, tasks_per_step = 2, group_size = 2, eval_every = 0 }}
""")
    return recipe


@contextmanager
def command(machine: str, *words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`lightningrl WORDS` in a namespace."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", "lightningrl", *words],
            cwd=log.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.skipif(not usable(), reason="only root makes network namespaces")
def test_rollouts_run_in_an_agent_that_reaches_only_its_worker_which_reaches_only_the_server(tmp_path: Path) -> None:
    with machines() as (server, worker, agent):
        recipe, run = lay_out(tmp_path, agent), tmp_path / "run"
        train = ["train", str(recipe), "--run-dir", str(run), "--listen", f"{SERVER}:8100"]
        key = run / "worker.key"
        work = ["worker", f"http://{SERVER}:8100", "--key-file", str(key), "--recipe", str(recipe), "--workers", "1"]
        with command(server, *train, log=tmp_path / "train.log") as training:
            while not key.exists():
                assert training.poll() is None, (tmp_path / "train.log").read_text()
                time.sleep(0.05)
            with command(worker, *work, log=tmp_path / "worker.log") as working:
                assert training.wait(90) == 0, (tmp_path / "train.log").read_text()
                assert working.wait(20) == 0, (tmp_path / "worker.log").read_text()
    with sqlite3.connect(f"file:{run / 'store.sqlite'}?mode=ro", uri=True) as store:
        outputs = [output for (output,) in store.execute("SELECT output FROM attempts")]
    assert len(outputs) == 4 + 2 * 2 * 2  # a step; the held-out tasks before and after it, sampled and greedy
    assert {re.sub(r"\s", "", output) for output in outputs} == {
        f'{{"answered":1,"server":false,"addresses":["{AGENT}/24"]}}'
    }
