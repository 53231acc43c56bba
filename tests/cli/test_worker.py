"""`lightningrl worker` as a process of its own, for a server in this one."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.recipe import load_config
from lightningrl.remote.digest import copy_of
from tests.workers import KEY, Server, ended

AGENT = '''
import json, os, time, urllib.request


def run(task):
    """One call of the model, by plain HTTP; then it may wait for a file, or fail."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "say a word"}]}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    said = json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]["content"]
    while task["question"] and not os.path.exists(task["question"]):
        time.sleep(0.02)
    return said


def reward(task, answer):
    return float(answer == "hello")


def tasks(split, *, seed, count):
    return []


if __name__ == "__main__":
    print(run(json.load(__import__("sys").stdin)))
'''
RECIPE = f"""
name = "small"
[agent]
command = ["{sys.executable}", "agent.py"]
reward = "rewards:reward"
workers = 1
concurrency = 4
[tasks]
source = "rewards:tasks"
[model]
path = "model"
"""
REWARDS = """
def reward(task, answer):
    return float(answer.strip() == "hello")


def tasks(split, *, seed, count):
    return []
"""
NO_TORCH = 'raise ImportError("a worker needs no torch")'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@pytest.fixture
async def server(tmp_path: Path, recipe: Path) -> AsyncIterator[Server]:
    copy = copy_of(load_config(recipe).agent, root=recipe)
    async with Server(path=tmp_path / "store.sqlite", port=0, copy=copy).up() as server:
        yield server


class Process:
    """A running worker, and the events that it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[Mapping[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.events.append(json.loads(line))

    async def saw(self, event: str) -> Mapping[str, Any]:
        async with asyncio.timeout(60):
            while not (found := [one for one in self.events if one["event"] == event]):
                assert self._process.returncode is None, await self.complaints()
                await asyncio.sleep(0.02)
        return found[-1]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def complaints(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()

    async def end(self) -> int:
        async with asyncio.timeout(60):
            code = await self._process.wait()
            await self._reading
        return code

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def worker(server: Server, recipe: Path, *options: str, key: str = KEY) -> AsyncIterator[Process]:
    key_file, without_torch = recipe.parent / f"{key}.key", recipe.parent / "without"
    key_file.write_text(f"{key}\n")
    without_torch.mkdir(exist_ok=True)
    (without_torch / "torch.py").write_text(NO_TORCH)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lightningrl", "worker", server.url, "--key-file", str(key_file)),
        *("--recipe", str(recipe), "--json", *options),
        cwd=recipe.parent,
        env={"PATH": "/usr/bin:/bin", "HOME": str(recipe.parent), "PYTHONPATH": str(without_torch)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = Process(process)
    try:
        yield running
    finally:
        running.kill()
        await running.end()


async def test_a_worker_without_torch_runs_an_agent_through_its_relay(server: Server, recipe: Path) -> None:
    async with worker(server, recipe, "--max-attempts", "2", "--name", "box", "--label", "gpu") as running:
        await server.enqueue("a", "b", labels=["gpu"])
        assert await ended(server, "a", "b") == ["succeeded"] * 2
        assert await running.end() == 0
        assert running.events[-1]["succeeded"] == 2
    [reward] = await server.store.rewards(["a.1"])
    [call] = await server.store.calls(["a.1"])
    assert reward.value == 1.0 and call.completion_ids.size
    [log] = recipe.parent.glob("runs/worker-box-*/agents.log")
    assert "[a.1] hello\n" in log.read_text()


async def test_the_first_signal_drains_a_worker(server: Server, recipe: Path, tmp_path: Path) -> None:
    async with worker(server, recipe) as running:
        await server.enqueue("running", question=str(tmp_path / "go"))
        await running.saw("began")
        running.signal(signal.SIGTERM)
        await running.saw("draining")
        await server.enqueue("late")
        (tmp_path / "go").touch()
        assert await running.end() == 0
        assert await ended(server, "running") == ["succeeded"]
        assert (await server.store.count()).get("queued") == 1
        assert server.workers.roster.all() == []


async def test_a_worker_that_ends_does_not_wait_for_a_server_that_is_gone(tmp_path: Path, recipe: Path) -> None:
    copy = copy_of(load_config(recipe).agent, root=recipe)
    server = Server(path=tmp_path / "gone.sqlite", port=0, lease_s=1.0, copy=copy)
    async with AsyncExitStack() as stack:
        async with server.up():
            running = await stack.enter_async_context(worker(server, recipe))
            await server.enqueue("running", question=str(tmp_path / "never"))
            await running.saw("began")
        await running.saw("away")
        running.signal(signal.SIGTERM)
        assert await running.end() == 0


async def test_a_second_signal_ends_a_worker_at_once(server: Server, recipe: Path, tmp_path: Path) -> None:
    async with worker(server, recipe) as running:
        await server.enqueue("running", question=str(tmp_path / "never"))
        await running.saw("began")
        running.signal(signal.SIGTERM)
        await running.saw("draining")
        await asyncio.sleep(1.1)  # sooner, it counts as the same signal
        running.signal(signal.SIGTERM)
        assert await running.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("change", "message"),
    [("key", "not the worker key of this run"), ("recipe", "`agent.py` is another on the worker than on the server")],
)
async def test_what_the_server_refuses_ends_a_worker_with_a_hint(
    server: Server, recipe: Path, change: str, message: str
) -> None:
    if change == "recipe":
        (recipe / "agent.py").write_text(f"{AGENT}\n# changed\n")
    async with worker(server, recipe, key="lrl-worker-other" if change == "key" else KEY) as running:
        assert await running.end() == 2
        said = await running.complaints()
    assert message in said and "hint: " in said and "Traceback" not in said


async def test_an_agent_that_cannot_be_loaded_ends_its_worker(server: Server, recipe: Path) -> None:
    async with worker(server, recipe, "--accept-differences", 'agent.command=["no-such-program"]') as running:
        assert await running.end() == 2
        assert "there is no program `no-such-program`" in await running.complaints()
    assert server.workers.roster.all() == []
