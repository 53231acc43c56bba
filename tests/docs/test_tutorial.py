"""The tutorial's agent, tasks and teacher work, and its settings are those of `lightningrl new`."""

import json
import re
import tomllib
from pathlib import Path

from lightningrl.cli.new import lay_out
from lightningrl.recipe import load_config
from tests.command import run_command

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def test_its_agent_is_taught_by_its_teacher(tmp_path: Path) -> None:
    lay_out(tmp_path / "trains")
    for name, text in re.findall(r"^```python\n# (\S+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
        (tmp_path / "trains" / name).write_text(text)
    [shown] = [tomllib.loads(block) for block in re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)]
    config = load_config(tmp_path / "trains").model_dump()
    for section, settings in shown.items():
        assert {name: config[section][name] for name in settings} == settings
    few = ["warmstart.count=40", "warmstart.steps=2", "warmstart.steer=false"]
    done = run_command("warmstart", "recipe.toml", *few, "--json", cwd=tmp_path / "trains")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["demonstrations"] == 40, "the teacher does every task"
