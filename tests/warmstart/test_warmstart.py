"""`lightningrl warmstart`: from demonstrations to a model whose agent succeeds now and then."""

import asyncio
import hashlib
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightningrl.cli.warmstart import Result, warmstart
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from lightningrl.store import open_store
from lightningrl.warmstart.making import Pace
from tests.command import run_command

WITH = ("warmstart.teacher=", "warmstart.demonstrations=parrot:conversations")


def made(folder: Path, *overrides: str, out: str | None = None, source: str | None = None, **pace: Any) -> Result:
    return warmstart(
        load_config(folder / "recipe.toml", overrides),
        source=None if source is None else folder / source,
        out=None if out is None else folder / out,
        pace=Pace(**pace),
        run_dir=folder / f"run-{out}",
        console=Console(file=StringIO()),
    )


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_teacher_is_imitated_until_success_is_high_enough(colours: Path) -> None:
    found = made(colours)
    assert found.reached and 0.2 <= found.success <= 0.5, found
    assert 130 <= found.demonstrations <= 150, "every fourth rollout of the teacher is wrong, and earns nothing"
    assert found.model.endswith("warmstart") and not found.reason
    splits, temperatures = asyncio.run(tried(colours / "run-None"))
    assert (splits, temperatures) == ({"train"}, {1.0})
    again = made(colours, source="run-None/teacher", out="again")
    assert (again.steps, again.success) == (found.steps, found.success), "tried on the same tasks"
    assert weights(colours / "again") == weights(colours / "warmstart"), "recorded rollouts are as good as the teacher"


async def tried(run: Path) -> tuple[set[str], set[float]]:
    """(splits, temperatures) of the rollouts that success was measured on"""
    store = await open_store(f"sqlite://{run / 'store.sqlite'}")
    rollouts = await store.rollouts()
    await store.close()
    return {rollout.task.split for rollout in rollouts}, {rollout.sampling["temperature"] for rollout in rollouts}


def test_without_steering_all_steps_are_taken_and_the_same_settings_make_the_same_weights(colours: Path) -> None:
    fixed = (*WITH, "warmstart.steer=false", "warmstart.steps=3")
    assert made(colours, *fixed, out="first").steps == 3
    made(colours, *fixed, out="again")
    made(colours, *fixed, out="reordered", order=1)
    assert weights(colours / "again") == weights(colours / "first") != weights(colours / "reordered")


def test_a_base_is_trained_further_with_its_own_tokenizer(colours: Path) -> None:
    fixed = (*WITH, "warmstart.steer=false")
    made(colours, *fixed, "warmstart.steps=2")
    made(colours, *fixed, "warmstart.base=warmstart", "warmstart.steps=1000000000", out="on", seconds=0.3)
    assert weights(colours / "on") != weights(colours / "warmstart")
    assert (colours / "on" / "tokenizer.json").read_text() == (colours / "warmstart" / "tokenizer.json").read_text()


@pytest.mark.parametrize("out", ["models", "models/notes.txt", "."])
def test_a_folder_of_other_origin_is_not_replaced(colours: Path, out: str) -> None:
    (colours / "models").mkdir()
    notes = colours / "models" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(UserError, match="was not made by `lightningrl warmstart`"):
        made(colours, *WITH, out=out)
    assert notes.read_text() == "mine"


def test_too_low_a_success_is_reported_with_the_reason(colours: Path) -> None:
    strangers = ("warmstart.teacher=", "warmstart.demonstrations=parrot:strangers", "warmstart.steps=6")
    done = run_command("warmstart", "recipe.toml", *strangers, "--json", cwd=colours)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["success"] < 0.2 and not found["reached"]
    assert "another system prompt" in found["reason"]
    assert "was not reached in 3 times `warmstart.steps`" in done.stderr and "hint: " in done.stderr
    assert (colours / "warmstart" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["warmstart.teacher="], "has no demonstrations"),
        (["model.path=/models/qwen"], "will not be replaced"),
        (["model.path=../beside"], "will not be replaced"),
        (["model.path=Qwen/Qwen3-0.6B"], "will not be replaced"),
        (["warmstart.base=warmstart"], "`warmstart.base` is"),
        (["warmstart.demonstrations=parrot:conversations"], "give either `teacher` or `demonstrations`"),
        (["warmstart.teacher=", "warmstart.demonstrations=nowhere"], "no demonstrations at"),
        (["warmstart.teacher=parrot:nobody"], "has no `nobody`"),
        (["warmstart.count=8", "warmstart.reward=2"], "the best of `8` rewards is `1`"),
        (["warmstart.shape={depth = 3}"], "`warmstart.shape"),
    ],
)
def test_invalid_settings_are_refused_with_a_hint(colours: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        made(colours, *overrides)
    assert said in caught.value.message and caught.value.hint
    assert not (colours / "warmstart").exists()
