"""Do unchanged agents on Node run offline from a recording, and is it byte for byte as when it was recorded?

Each agent runs twice in the same folder: with a model, then with `lightningrl run --replay`. A proxy compares what the
gateway sends. Claude Code names its folder, its home and the date in its prompt: see docs/replay.md.
"""

import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .conftest import HERE, LONGEST_S, ROOT
from .test_node import CLAUDE, PATH, QUESTION, READY

RECIPE = ROOT / "recipes" / "node_vercel"
TASK = {
    "question": "ben asks: price of what ann returned",
    "records": {"ann returned": "blue lamp", "blue lamp price": "14", "ann price": "20", "ben returned": "red cup"},
}
HINT = "install Node.js 20 or newer with npm, then `make test-agents`; MATRIX_NODE=skip leaves these tests out"

pytestmark = [pytest.mark.skip(reason="MATRIX_NODE=skip")] if os.environ.get("MATRIX_NODE") == "skip" else []


@dataclass(frozen=True, kw_only=True)
class Done:
    """One run of a command."""

    exit_code: int
    printed: list[str]
    """Its output."""
    answers: list[Any]
    """What the gateway sent, in the order of requests: method, path, status, headers, body."""
    report: dict[str, Any]
    """The JSON object that `lightningrl run` prints last."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a command runs, with the same environment each time."""

    folder: Path
    home: Path
    """Working directory and home."""
    code: str
    """The output of a tool."""

    def run(self, name: str, *command: str, options: tuple[str, ...], stdin: str = "") -> Done:
        """`name`: of the folder with the records."""
        taped = self.folder / f"{name}.jsonl"
        tap = [sys.executable, str(HERE / "tap.py"), str(taped), *command]
        ours = [sys.executable, "-m", "lightningrl", "run", "--json", "--run-dir", str(self.folder / name), *options]
        more = {
            "MATRIX_CODE": self.code,
            "MATRIX_SAID": str(self.folder / "said"),
            "PYTHONPATH": str(HERE),
            "HOME": str(self.home),
        }
        done = subprocess.run(
            [*ours, "--", *tap],
            cwd=self.home,
            env={**os.environ, **more},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        lines = done.stdout.splitlines()
        assert lines and lines[-1].startswith("{"), f"no report\n{done.stdout}\n{done.stderr}"
        answers = taped.read_text(encoding="utf-8").splitlines() if taped.exists() else []
        return Done(
            exit_code=done.returncode,
            printed=lines[:-1],
            answers=[json.loads(line) for line in answers],
            report=json.loads(lines[-1]),
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    home = tmp_path / "home"
    home.mkdir()
    return Place(folder=tmp_path, home=home, code=f"code-{secrets.token_hex(4)}")


def assert_the_same(first: Done, again: Done, *, calls: int) -> None:
    assert first.exit_code == again.exit_code == 0
    assert first.printed == again.printed
    assert first.answers == again.answers
    counts = {"recorded": calls, "played_back": calls, "never_asked": 0, "unknown": []}
    assert {name: again.report[name] for name in counts} == counts


def needs(ready: Path) -> None:
    if not ready.exists():
        pytest.fail(f"`{ready}` is missing\nhint: {HINT}", pytrace=False)


def test_the_javascript_recipe_runs_offline_from_the_recording_of_a_model(place: Place) -> None:
    needs(RECIPE / "node_modules" / ".ready")
    command = ("env", "SHOP_MAX_TOKENS=24", "node", str(RECIPE / "agent.mjs"))
    first = place.run("first", *command, options=("--model", str(RECIPE / "warmstart")), stdin=json.dumps(TASK))
    again = place.run("again", *command, options=("--replay", str(place.folder / "first")), stdin=json.dumps(TASK))
    assert first.report["calls"] >= 2
    assert_the_same(first, again, calls=first.report["calls"])


def test_claude_code_runs_offline_from_a_recording(place: Place) -> None:
    needs(READY)
    command, trace = ("env", PATH, *CLAUDE), place.home / "trace.txt"
    first = place.run("first", *command, options=("--engine", "scripts_node:shell"))
    assert trace.read_text().split() == [f"{place.code}/1", f"{place.code}/2"]
    trace.unlink()
    again = place.run("again", *command, options=("--replay", str(place.folder / "first")))
    assert trace.read_text().split() == [f"{place.code}/1", f"{place.code}/2"]  # tools run again
    assert first.printed[0] == f"It printed {place.code}/1 and {place.code}/2."
    assert any("content_block_delta" in body for *_, body in first.answers)
    assert_the_same(first, again, calls=3)


def test_claude_code_without_its_own_prompt_is_played_back_in_another_folder(place: Place, tmp_path: Path) -> None:
    needs(READY)
    bare = ("--bare", "--system-prompt", "You are terse.", "--allowedTools", "Bash", "-p", QUESTION)
    command = ("env", PATH, "claude", *bare)
    first = place.run("first", *command, options=("--engine", "scripts_node:shell"))
    home = tmp_path / "elsewhere"
    home.mkdir()
    elsewhere = Place(folder=tmp_path, home=home, code=place.code)
    again = elsewhere.run("again", *command, options=("--replay", str(place.folder / "first")))
    assert_the_same(first, again, calls=3)


def test_another_output_of_a_tool_is_found_at_the_call_after_it(place: Place) -> None:
    needs(READY)
    command = ("env", PATH, *CLAUDE)
    place.run("first", *command, options=("--engine", "scripts_node:shell"))
    (place.home / "trace.txt").unlink()
    changed = Place(folder=place.folder, home=place.home, code="code-0000")
    again = changed.run("again", *command, options=("--replay", str(place.folder / "first")))
    assert again.exit_code == 1
    assert (again.report["played_back"], again.report["never_asked"]) == (1, 2)
    [difference] = again.report["unknown"]
    assert "(tool) has" in difference and "code-0000/1" in difference and f"{place.code}/1" in difference
