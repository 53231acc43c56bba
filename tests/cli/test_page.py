"""The page of a run while it trains: a process only while somebody looks, which never disturbs the run."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from rich.console import Console

from lightningrl import keeper
from lightningrl.cli import page
from lightningrl.cli.page import LOG, offered
from tests.conftest import SmallRecipe
from tests.ui.conftest import make_run

ADDRESS = re.compile(r"page: (http://127\.0\.0\.1:\d+/)")
HOLD = """
import asyncio, sys
from pathlib import Path
from lightningrl.cli.console import make_console
from lightningrl.cli.page import offered

async def main():
    async with offered(Path(sys.argv[1]), make_console(stderr=False)):
        await asyncio.sleep(60)

asyncio.run(main())
"""


def pages(parent: int) -> list[int]:
    """The processes below `parent`, without itself: a keeper and the page."""
    return keeper.descendants([parent], keeper.parents())[1:]


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def address(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    found = ADDRESS.search(to.file.getvalue())
    assert found is not None and f"{found[0]}#/run/" in to.file.getvalue()
    return found[1]


async def state(url: str) -> str:
    async with httpx2.AsyncClient(verify=False) as client:
        answer = await client.get(f"{url}api/runs", timeout=30)
        return answer.json()["runs"][0]["state"]


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    return await make_run(tmp_path / "one")


async def test_nothing_runs_before_somebody_looks_and_nothing_after_the_end(run: Path) -> None:
    to = console()
    before = set(pages(os.getpid()))
    async with offered(run, to):
        await asyncio.sleep(0.2)
        assert set(pages(os.getpid())) == before and not (run / LOG).exists()
        assert await state(address(to)) == "stopped"
        started = set(pages(os.getpid())) - before
        assert len(started) == 2, "a keeper and the page"
    assert set(pages(os.getpid())) == before
    with pytest.raises(httpx2.ConnectError):
        await state(address(to))


async def test_a_page_that_is_killed_is_started_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAUSE_S", 0.1)
    to = console()
    before = set(pages(os.getpid()))
    async with offered(run, to):
        seen: set[int] = set()
        for _ in range(2):
            assert await state(address(to)) == "stopped"
            now = set(pages(os.getpid())) - before
            assert len(now) == 2 and not now & seen
            for process in now:
                os.kill(process, signal.SIGKILL)
            seen |= now
            while set(pages(os.getpid())) & now:
                await asyncio.sleep(0.02)


async def test_a_page_that_ends_because_nobody_looks_is_started_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (run / "sitecustomize.py").write_text("import lightningrl.cli.ui as ui\nui.IDLE_S = 0.5\n")
    assert code
    monkeypatch.setenv("PYTHONPATH", str(run))
    monkeypatch.setattr(page, "PAUSE_S", 0.1)
    to = console()
    before = set(pages(os.getpid()))
    async with offered(run, to):
        for _ in range(2):
            assert await state(address(to)) == "stopped"
            for _ in range(200):
                if set(pages(os.getpid())) == before:
                    break
                await asyncio.sleep(0.05)
            assert set(pages(os.getpid())) == before


async def test_a_page_that_cannot_start_disturbs_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = console()
    monkeypatch.setattr(page.sys, "executable", "/nowhere/python")
    async with offered(run, to):
        for _ in range(3):
            with pytest.raises(httpx2.TimeoutException):
                async with httpx2.AsyncClient(verify=False) as client:
                    await client.get(address(to), timeout=0.1)
        began = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - began < 0.1, "it is tried again after a pause"


async def test_without_a_free_port_there_is_no_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr("lightningrl.ui.door.socket.create_server", none)
    to = console()
    async with offered(run, to):
        assert isinstance(to.file, io.StringIO) and "no page: cannot serve" in to.file.getvalue()


async def test_the_page_dies_with_a_run_that_is_killed(run: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    found = ADDRESS.search(await asyncio.to_thread(holder.stdout.readline))
    assert found is not None and await state(found[1]) == "stopped"
    below = pages(holder.pid)
    assert len(below) == 2
    holder.kill()
    holder.wait()
    holder.stdout.close()
    for _ in range(200):
        if not set(below) & keeper.parents().keys():
            break
        await asyncio.sleep(0.05)
    assert not set(below) & keeper.parents().keys()


def test_training_prints_the_address_unless_told_not_to(small_recipe: SmallRecipe) -> None:
    arguments = ("train", str(small_recipe.path), "loop.steps=0", "tasks.heldout=1", "--run-dir")
    told = small_recipe.cli(*arguments, "a")
    assert told.returncode == 0 and ADDRESS.search(told.stdout), told.stderr
    quiet = small_recipe.cli(*arguments, "b", "--no-ui")
    assert quiet.returncode == 0 and "page:" not in quiet.stdout
    assert not (small_recipe.folder / "a" / "process.json").exists()
