"""`lightningrl new`: makes a folder that can be trained at once, and names the files to change."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightningrl.cli.app import app
from lightningrl.cli.new import PARTS, TEMPLATE, lay_out, shipped
from lightningrl.errors import UserError
from lightningrl.recipe import load_config

ROOT = Path(__file__).parents[2]


def lightningrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightningrl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


def test_a_new_folder_can_be_trained_at_once_under_its_own_name(tmp_path: Path) -> None:
    made = lightningrl(tmp_path, "new", "my-agent")
    assert made.returncode == 0, made.stderr
    assert "cd my-agent && lightningrl train recipe.toml" in made.stdout
    assert all(
        file in made.stdout for file in ("agent.py", "tasks.py", "teacher.py", "lightningrl warmstart recipe.toml")
    )
    assert {path.name for path in (tmp_path / "my-agent").iterdir()} == set(PARTS)
    small = [
        "loop.steps=1",
        "loop.tasks_per_step=6",
        "loop.group_size=4",
        "tasks.heldout=6",
        "agent.concurrency=12",
        "engine.slots=24",
    ]
    done = lightningrl(tmp_path / "my-agent", "train", "recipe.toml", *small, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["steps"], result["rollouts"], result["heldout_failed"]) == (1, 6 * 4 + 4 * 6, 0)
    assert result["run_dir"].startswith("runs/my-agent-")
    run = tmp_path / "my-agent" / result["run_dir"]
    (step,) = [
        row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "step"
    ]
    assert step["calls/forked"] == 0 < step["calls/bridged"]
    assert step["policy/logprob_gap"] < 1e-4
    assert 0 < step["reward/mean"] < 1


def test_only_the_name_differs_from_the_template(tmp_path: Path) -> None:
    made = lay_out(tmp_path / "mine")
    template = ROOT / "recipes" / "from_scratch"
    for file in made.files:
        copy, source = (tmp_path / "mine" / file).read_bytes(), (template / file).read_bytes()
        assert copy == (source.replace(b"from-scratch", b"mine") if file.endswith(".toml") else source), file
    assert [load_config(tmp_path / "mine" / file).name for file in ("recipe.toml", "gpu.toml")] == ["mine", "mine-gpu"]


def test_json_has_one_object_on_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "with space/agent-2", "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert (made["name"], made["folder"]) == ("agent-2", "with space/agent-2")
    assert made["next"] == ["cd 'with space/agent-2'", "lightningrl train recipe.toml"]
    assert all((tmp_path / made["folder"] / file).is_file() for file in made["files"])
    assert "watch it learn" in done.stderr


def test_an_empty_folder_and_the_current_one_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = lay_out(Path("."))
    assert (made.name, made.next) == ("here", ["lightningrl train recipe.toml"])


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = lightningrl(tmp_path.parent, "new", tmp_path.name)
    assert done.returncode == 2
    assert f"`{tmp_path.name}` exists and is not empty" in done.stderr and "hint: give another name" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["my agent", "-agent", "agent*", 'a"b', "[x]", "a\nb"])
def test_a_name_that_runs_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        lay_out(tmp_path / name)
    assert f"an agent cannot be named `{name}`" in caught.value.message and "`my-agent`" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_a_path_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "agent"):
        with pytest.raises(UserError, match=r"cannot make the folder .*: Not a directory") as caught:
            lay_out(folder)
        assert caught.value.hint


def test_recipes_that_the_command_line_copies_are_in_the_wheel() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "force-include"
    ]
    for recipe in (TEMPLATE, "sql_langgraph"):
        assert shipped(recipe) == ROOT / "recipes" / recipe
        assert included[f"recipes/{recipe}"] == f"lightningrl/recipes/{recipe}"
