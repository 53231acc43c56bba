"""Which settings may change when a run is resumed? Which rows does it write, and keep?"""

import time
from pathlib import Path

import numpy as np
import pytest

from lightningrl.cli.folder import Journal, RunFolder, new_folder, resumed_folder
from lightningrl.data.intervals import bootstrap_mean
from lightningrl.errors import UserError
from lightningrl.progress import Exam
from lightningrl.recipe import load_config

ERRANDS = Path("recipes/errands/recipe.toml")


@pytest.mark.parametrize(
    "override", ["gateway.port=8100", "gateway.public_url=http://here:1", "agent.workers=0", "agent.concurrency=7"]
)
def test_a_resumed_run_may_move_and_have_other_workers(tmp_path: Path, override: str) -> None:
    new_folder(load_config(ERRANDS), tmp_path).make(load_config(ERRANDS))
    assert resumed_folder(load_config(ERRANDS, [override]), tmp_path).path == tmp_path


@pytest.mark.parametrize("override", ["seed=7", 'gateway.history="template"', "agent.timeout_s=7"])
def test_a_resumed_run_keeps_the_settings_of_its_results(tmp_path: Path, override: str) -> None:
    new_folder(load_config(ERRANDS), tmp_path).make(load_config(ERRANDS))
    with pytest.raises(UserError, match=rf"settings of `{override.partition('.')[0].partition('=')[0]}` differ"):
        resumed_folder(load_config(ERRANDS, [override]), tmp_path)


def exam(version: int) -> Exam:
    return Exam(version=version, mode="sampled", rollouts=(), rewards=np.array([0.0, 1.0, 1.0, np.nan]))


def journal(folder: RunFolder, *, version: int, steps: int) -> None:
    """A run that begins at `version`, takes some steps and is then killed."""
    made = Journal(folder, version=version)
    made.examined(exam(0))
    for step in range(version, version + steps):
        made.voided(step, "`a.1` is void: a clock")
        made.stepped(step, {"reward/mean": 0.5})


def test_each_row_has_its_time_and_a_resumed_run_keeps_every_start(tmp_path: Path) -> None:
    folder, before = RunFolder(tmp_path), time.time()
    journal(folder, version=0, steps=2)
    kept = folder.rows()[:4]
    journal(folder, version=1, steps=1)  # step 1 was not published
    journal(folder, version=1, steps=2)
    rows = folder.rows()
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("began", 0), ("exam", 0), ("void", 0), ("step", 0),
        ("began", 1), ("began", 1), ("void", 1), ("step", 1), ("void", 2), ("step", 2),
    ]  # fmt: skip
    assert rows[:4] == kept, "with the times at which they happened"
    times = [row["at"] for row in rows]
    assert before - 0.001 <= times[0] and times == sorted(times) and times[-1] <= time.time() + 0.001


def test_an_exam_has_the_interval_that_the_terminal_shows(tmp_path: Path) -> None:
    journal(RunFolder(tmp_path), version=0, steps=0)
    row = RunFolder(tmp_path).rows()[1]
    assert (row["reward/low"], row["reward/high"]) == bootstrap_mean(np.array([0.0, 1.0, 1.0]))
    assert row["reward/low"] < row["reward/mean"] < row["reward/high"]
