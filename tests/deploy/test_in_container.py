"""`deploy/in-container.sh` gives an agent in a container its task, and ends the container with the attempt."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import AgentConfig
from lightningrl.runner import Outcome, environment
from lightningrl.runner.conformance import attempt
from lightningrl.runner.environment import addresses
from lightningrl.runner.pool import WorkerPool
from tests.deploy.docker_double import Daemon
from tests.docs.blocks import ROOT
from tests.runner.processes import gone, written

SCRIPT = ROOT / "deploy" / "in-container.sh"
GATEWAY = "http://127.0.0.1:4711"
AGENT = "import json, os, sys; print(json.dumps(dict(env=dict(os.environ), task=json.load(sys.stdin))))"
REWARD = """
def reward(task, output):
    return 1
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    try:
        yield daemon
    finally:
        daemon.close()


@asynccontextmanager
async def pool(daemon: Daemon, root: Path, script: str, **env: str) -> AsyncIterator[WorkerPool]:
    """A pool whose agent is a shell script in a container."""
    (root / "grader.py").write_text(REWARD)
    agent = AgentConfig(
        command=[str(SCRIPT), "my-image", "sh", "-c", script],
        reward="grader:reward",
        workers=1,
        env={"CONTAINER_RUNTIME": str(daemon.client), **env},
    )
    runner = WorkerPool(agent, root=root, env={"OPENAI_BASE_URL": f"{GATEWAY}/v1"})
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def run(runner: WorkerPool, *, timeout_s: float = 60.0, **task: Any) -> Outcome:
    rollout, first, _ = attempt(task, name="1", timeout_s=timeout_s)
    return await runner.run(rollout, first, addresses(GATEWAY, key="secret"))


async def test_an_agent_in_a_container_gets_its_task_and_the_model(daemon: Daemon, tmp_path: Path) -> None:
    text = 'line\nthat\'s "all" \\n $HOME'
    async with pool(daemon, tmp_path, f"python -c '{AGENT}'", CONTAINER_OPTIONS="--memory 2g") as runner:
        outcome = await run(runner, text=text)
    assert outcome.status == "succeeded", outcome.error
    assert outcome.output["task"] == {"text": text}
    seen = outcome.output["env"]
    assert seen["OPENAI_BASE_URL"] == f"{GATEWAY}/v1" and seen["ANTHROPIC_BASE_URL"] == GATEWAY
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == "secret"
    assert seen["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == f"{GATEWAY}/v1/traces"
    assert "HOME" not in seen
    [options] = daemon.options
    assert {"--network host", "--cap-drop=ALL", "--memory 2g"} <= set(options)


async def test_a_large_task_arrives_whole(daemon: Daemon, tmp_path: Path) -> None:
    async with pool(daemon, tmp_path, "wc -c") as runner:
        outcome = await run(runner, text="x" * 300_000)
    assert int(outcome.output) > 300_000


async def test_how_the_program_fails_is_recorded(daemon: Daemon, tmp_path: Path) -> None:
    async with pool(daemon, tmp_path, "echo 'ValueError: no such table' >&2; exit 3") as runner:
        outcome = await run(runner)
    assert outcome.status == "failed"
    assert outcome.error is not None and "exited with code 3: ValueError: no such table" in outcome.error


async def test_a_container_ends_with_an_attempt_that_timed_out(daemon: Daemon, tmp_path: Path) -> None:
    script = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/child; wait"
    async with pool(daemon, tmp_path, script) as runner:
        outcome = await run(runner, timeout_s=1.0)
        assert outcome.status == "timeout"
        assert await gone([daemon.containers[0].pid, await written(tmp_path / "child")], timeout_s=5)


async def test_a_container_ends_with_a_pool_that_is_closed(daemon: Daemon, tmp_path: Path) -> None:
    async with pool(daemon, tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; echo done") as runner:
        assert (await run(runner)).output == "done"
        assert await gone([await written(tmp_path / "child")], timeout_s=5)


def test_every_variable_of_the_model_is_passed_on() -> None:
    [listed] = re.findall(r"^variables='\n(.*?)'$", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)
    tables = ("ADDRESSES", "KEYS", "MODELS", "TELEMETRY", "AZURE", "QUIET", "PLACES")
    wanted = {name for table in tables for name in getattr(environment, table)} - {"CODEX_HOME"}
    assert {*listed.split()} - {"LIGHTNINGRL_ATTEMPT"} == wanted
