"""Runs each agent of the matrix as a person would: `lightningrl run` on an unchanged program.

The first test starts all agents of the session, a few at a time: most of their time is start-up.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.gateway.scripted import PLAIN
from lightningrl.store import open_store
from lightningrl.types import Call

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
AT_ONCE = 3
"""Three agents keep two cores busy, as an agent also waits."""
LONGEST_S = 60.0
"""Ten times what any agent takes on an idle machine."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An agent, its command, and the script that answers its requests."""

    name: str
    command: tuple[str, ...]
    """Started in an empty folder, which is also its home."""
    engine: str
    """Module and function of the script, e.g. `scripts:weather`."""
    flags: tuple[str, ...] = ()
    """Further flags of `lightningrl run`."""
    needs: Path
    """A path that exists once the agent's packages are installed."""
    hint: str
    """What to do if `needs` is missing."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The results of a program."""

    code: str
    """A secret of the tool: it proves that an answer has the tool's result."""
    printed: dict[str, list[Any]]
    """`TOOL` and `ANSWER` → the JSON values printed after that word, in order."""
    report: dict[str, Any]
    """The JSON object that `lightningrl run` prints last."""
    lines: list[str]
    """The agent's output."""
    folder: Path
    """Working directory of the agent."""
    said: dict[str, dict[str, Any]]
    """Prompt → answer of the script."""
    calls: list[Call]
    log: str
    seconds: float


@pytest.fixture(scope="session")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Program], Ran]]:
    """Program → its results."""
    wanted = [item for item in request.session.items if "ran" in item.fixturenames]  # type: ignore[attr-defined]
    items = [item for item in wanted if not item.get_closest_marker("skip")]
    selected = [item.callspec.params["case"].program for item in items]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ready = [program for program in selected if program.needs.exists()]
        futures: dict[Program, Future[Ran]] = {
            program: pool.submit(run, program, tmp_path_factory.mktemp(program.name)) for program in ready
        }

        def result(program: Program) -> Ran:
            if program not in futures:
                pytest.fail(f"`{program.needs}` is missing\nhint: {program.hint}", pytrace=False)
            return futures[program].result()

        yield result
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate.load(PLAIN)


def run(program: Program, folder: Path) -> Ran:
    code = f"code-{secrets.token_hex(4)}"
    home = folder / "home"
    home.mkdir()
    more = {
        "MATRIX_CODE": code,
        "MATRIX_SAID": str(folder / "said"),
        "PYTHONPATH": str(HERE),
        "HOME": str(home),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
    }
    flags = ["--engine", program.engine, *program.flags, "--json", "--run-dir", str(folder / "run")]
    ours = [sys.executable, "-m", "lightningrl", "run", *flags]
    began = time.monotonic()
    done = subprocess.run(
        [*ours, "--", *program.command],
        cwd=home,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    seconds = time.monotonic() - began
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("{"), f"no report\n{done.stdout}\n{done.stderr}"
    return Ran(
        code=code,
        printed={word: after(f"{word} ", lines) for word in ("TOOL", "ANSWER")},
        report=json.loads(lines[-1]),
        lines=lines[:-1],
        folder=home,
        said=_said(folder / "said"),
        calls=asyncio.run(_calls(folder / "run" / "store.sqlite")),
        log=f"{done.stdout}\n{done.stderr}",
        seconds=seconds,
    )


def after(word: str, lines: list[str]) -> list[Any]:
    return [json.loads(line.partition(word)[2]) for line in lines if word in line]


def _said(path: Path) -> dict[str, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {entry["prompt"]: entry["said"] for entry in map(json.loads, lines)}


async def _calls(path: Path) -> list[Call]:
    store = await open_store(f"sqlite://{path}")
    try:
        rollouts = await store.rollouts()
        attempts = await store.attempts([rollout.id for rollout in rollouts])
        return await store.calls([attempt.id for attempt in attempts])
    finally:
        await store.close()
