"""The life of a vLLM that a run owns, with a real vLLM: start, publish, death in the middle of a step, end."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightningrl.errors import EngineError
from lightningrl.keeper import descendants, parents
from lightningrl.recipe import load_config
from lightningrl.serve import LightningServer, lightning
from tests.conftest import SmallRecipe
from tests_vllm.conftest import PYTHON, GapWatcher

pytestmark = pytest.mark.timeout(900)
OWNED = ("engine.name=vllm", f"engine.python={PYTHON}", 'engine.flags=["--enforce-eager"]', "engine.cache_gib=0.25")
ADAPTER = ("model.lora_rank=8", "trainer.learning_rate=1e-2")
API, CORE = "vllm.entrypoints", "VLLM::EngineCore"
"""Parts of the command lines of vLLM's processes."""
OTHERS = set[int]()
GONE_S = 6.0
"""Seconds until a keeper has killed what it keeps."""


def commands(parent: int | None = None) -> dict[int, str]:
    """Process id → command line, of all processes below `parent`; None: this process."""
    found: dict[int, str] = {}
    for process in descendants([parent or os.getpid()], parents()):
        with contextlib.suppress(OSError):
            found[process] = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


@pytest.fixture(autouse=True)
def others() -> None:
    """Leave out the processes of other tests, such as a server for the whole session."""
    OTHERS.clear()
    OTHERS.update(commands())


def vllm_processes(part: str) -> list[int]:
    """Processes of the test's own vLLM whose command line has `part`, oldest first."""
    own = {process: line for process, line in commands().items() if process not in OTHERS}
    return sorted(process for process, line in own.items() if part in line and "keeper.py" not in line)


@contextlib.asynccontextmanager
async def owned(recipe: SmallRecipe, *overrides: str, said: list[str] | None = None) -> AsyncIterator[LightningServer]:
    folder = recipe.folder / "run"
    folder.mkdir()
    config = load_config(recipe.path, ["tasks.heldout=1", *OWNED, *overrides])
    async with lightning(config, folder, waiting=(said if said is not None else []).append) as server:
        yield server


async def test_a_run_starts_its_server_publishes_five_adapters_and_ends_it(small_recipe: SmallRecipe) -> None:
    watcher, said = GapWatcher(), list[str]()
    async with owned(small_recipe, *ADAPTER, "loop.steps=5", said=said) as server:
        assert vllm_processes(API) and vllm_processes(CORE)
        await server.loop(watcher).run()
    assert len(watcher.gaps) == 5 and max(watcher.gaps) < 1e-3
    assert not vllm_processes(API) and not vllm_processes(CORE)
    assert any(line.startswith("vLLM is ready after") for line in said), said


@pytest.mark.parametrize("victim", [API, CORE])
async def test_a_server_that_is_killed_in_the_middle_of_a_step_costs_no_rollout(
    victim: str, small_recipe: SmallRecipe, caplog: pytest.LogCaptureFixture
) -> None:
    small_recipe.rewrite_agent(lambda code: code.replace("max_tokens=6", "max_tokens=60"))
    caplog.set_level(logging.WARNING)
    watcher = GapWatcher()
    async with owned(small_recipe, *ADAPTER, "loop.steps=3", "loop.tasks_per_step=4", "agent.timeout_s=20") as server:

        async def kill_in_step_two() -> None:
            while not watcher.gaps or not (await server.store.count()).get("running"):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # calls are under way
            os.kill(vllm_processes(victim)[0], signal.SIGKILL)

        killing = asyncio.create_task(kill_in_step_two())
        await server.loop(watcher).run()
        await killing
        rollouts = await server.store.count()
    assert set(rollouts) == {"succeeded"}, rollouts
    assert len(watcher.gaps) == 3 and max(watcher.gaps) < 1e-3
    assert sum("started again" in record.message for record in caplog.records) == 1


async def test_a_server_that_never_gets_healthy_is_one_error_with_the_end_of_its_log(small_recipe: SmallRecipe) -> None:
    with pytest.raises(
        EngineError, match=r"(?s)vLLM ended before it was ready.*unrecognized arguments: --no-such-flag"
    ):
        async with owned(small_recipe, 'engine.flags=["--no-such-flag"]'):
            pass
    assert not vllm_processes(API)


@pytest.mark.parametrize("when", ["starting", "serving"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_that_is_stopped_leaves_no_process(when: str, number: signal.Signals, small_recipe: SmallRecipe) -> None:
    arguments = ("train", str(small_recipe.path), *OWNED, *ADAPTER, "loop.steps=1000", "--run-dir", "run")
    command = [sys.executable, "-m", "lightningrl", *arguments]
    with (small_recipe.folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, cwd=small_recipe.folder, stdout=out, stderr=out)
    log, metrics = small_recipe.folder / "run/vllm.log", small_recipe.folder / "run/metrics.jsonl"
    until = time.monotonic() + 300
    while not (
        metrics.exists() and metrics.stat().st_size if when == "serving" else log.exists() and log.stat().st_size
    ):
        assert process.poll() is None and time.monotonic() < until, (small_recipe.folder / "out.txt").read_text()
        time.sleep(0.1)
    below = [each for each in commands(process.pid) if each != process.pid]
    assert below
    process.send_signal(number)
    code = process.wait(timeout=60)
    assert code == (130 if number is signal.SIGINT else -signal.SIGKILL)
    until = time.monotonic() + (GONE_S if number is signal.SIGKILL else 0.5)
    while alive := [each for each in below if Path(f"/proc/{each}/statm").exists() and not zombie(each)]:
        assert time.monotonic() < until, alive
        time.sleep(0.1)


def zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
