"""`lightningrl demo`, as a whole, with small settings."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

from lightningrl import __version__


def lightningrl(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "lightningrl", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_ends_with_one_json_object_on_stdout(tmp_path: Path) -> None:
    small = [
        "loop.steps=1",
        "loop.tasks_per_step=3",
        "loop.group_size=4",
        "tasks.heldout=8",
        "agent.concurrency=12",
        "engine.slots=16",
    ]
    result = json.loads(lightningrl(tmp_path, "demo", *small, "--json").splitlines()[-1])
    figures = {
        "heldout_before",
        "heldout_after",
        "heldout_greedy_before",
        "heldout_greedy_after",
        "seconds",
        "steps",
        "rollouts",
        "run_dir",
    }
    assert figures <= result.keys()
    assert (result["steps"], result["rollouts"], result["heldout_failed"]) == (1, 3 * 4 + 4 * 8, 0)
    assert (tmp_path / result["run_dir"] / "curve.png").stat().st_size > 10_000


def test_dry_run_prints_settings_that_read_back(tmp_path: Path) -> None:
    shown = tomllib.loads(lightningrl(tmp_path, "demo", "--dry-run", "seed=5"))
    assert shown["seed"] == 5 and shown["agent"]["entry"] == "agent:run"
    assert json.loads(lightningrl(tmp_path, "demo", "--dry-run", "--json", "seed=5"))["seed"] == 5
    assert list(tmp_path.iterdir()) == []


def test_doctor_passes_on_this_machine(tmp_path: Path) -> None:
    found = json.loads(lightningrl(tmp_path, "doctor", "--json").splitlines()[-1])
    assert {check["name"] for check in found} >= {"python", "torch", "langgraph", "sqlite", "gpu", "vllm"}
    assert all(check["ok"] is not False for check in found)


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert lightningrl(tmp_path, "--version") == f"lightningrl {__version__}\n"
