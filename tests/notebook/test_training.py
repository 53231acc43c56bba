"""`lightningrl.train`: what it raises, and how it ends. `test_example.py` compares its weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, assert_type

import pytest

import lightningrl
from lightningrl.notebook.orders import overrides_of
from tests.cli.test_stop import children, hear, wait_until
from tests.conftest import SmallRecipe

SCRIPT = """
import lightningrl
lightningrl.train("recipe.toml", steps=500, run_dir="run", overrides={"tasks.heldout": 1})
"""


def test_the_import_is_light_and_its_names_are_typed(tmp_path: Path) -> None:
    heavy = "{'torch', 'rich', 'pandas', 'lightningrl.look', 'lightningrl.cli', 'lightningrl.notebook'}"
    code = f"import sys, lightningrl; print(sorted({heavy} & sys.modules.keys()), lightningrl.train.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "[] train\n" and len(lightningrl.__all__) <= 20
    with pytest.raises(AttributeError, match="no attribute `trian`"):
        lightningrl.trian  # type: ignore[attr-defined]  # noqa: B018
    (tmp_path / "config.toml").touch()
    assert_type(lightningrl.open(tmp_path), lightningrl.Run)  # pyright sees through `__getattr__`


def test_errors_are_raised_with_their_hints(small_recipe: SmallRecipe, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lightningrl.UserError, match=r"unknown key `loop\.step`") as wrong:
        lightningrl.train(small_recipe.path, overrides={"loop.step": 1})
    assert wrong.value.hint and "did you mean `steps`" in wrong.value.hint
    small_recipe.rewrite_agent(lambda text: text.replace("return [{", "return [] and [{"))
    with pytest.raises(lightningrl.UserError, match="tasks") as empty:  # noticed by the training process
        lightningrl.train(small_recipe.path, run_dir=small_recipe.folder / "run")
    assert empty.value.hint and not (small_recipe.folder / "run").exists()
    assert "error:" not in capfd.readouterr().err, "it is raised, so it is not printed, too"


def test_an_interrupt_ends_the_training_in_order_and_it_can_be_resumed(small_recipe: SmallRecipe) -> None:
    running = start(small_recipe, stderr=subprocess.PIPE)
    metrics = small_recipe.folder / "run" / "metrics.jsonl"
    wait_until(running, lambda: metrics.exists() and '"kind": "step"' in metrics.read_text())
    [child] = children(running)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=60)
    assert "KeyboardInterrupt" in told and not Path(f"/proc/{child}").exists()
    resume = 'lightningrl.train("run/config.toml", run_dir="run", resume=True)'
    assert f"finished steps are kept; continue with: {resume}" in told
    run = lightningrl.open(small_recipe.folder / "run")
    assert run.state == "stopped" and run.result is None and any(point.kind == "step" for point in run.curve())


def test_the_training_ends_when_the_process_that_asked_for_it_is_killed(small_recipe: SmallRecipe) -> None:
    running = start(small_recipe, stderr=subprocess.DEVNULL)  # a closed pipe would end it, too
    wait_until(running, (small_recipe.folder / "run" / "config.toml").exists)
    [child] = children(running)
    running.kill()
    running.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists():
        if time.monotonic() > deadline:
            os.kill(int(child), signal.SIGKILL)
            raise AssertionError("it goes on alone")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"loop.steps": 3, "loop": {"group_size": 8}}, ["loop.steps=3", "loop.group_size=8"]),
        ({"name": 'a "b"\n', "resume": True}, ['name="a \\"b\\"\\n"', "resume=true"]),
        ({"trainer.learning_rate": 1e-5}, ["trainer.learning_rate=1e-05"]),
        ({"routes": [{"model": "m", "n": 1}]}, ['routes=[{"model" = "m", "n" = 1}]']),
        ({"engine.urls": ("http://a", "http://b")}, ['engine.urls=["http://a", "http://b"]']),
    ],
)
def test_settings_are_written_as_overrides(given: dict[str, Any], found: list[str]) -> None:
    assert overrides_of(given) == found


def test_a_setting_that_toml_lacks_is_refused() -> None:
    with pytest.raises(lightningrl.UserError, match=r"`loop\.steps` cannot be `None`"):
        overrides_of({"loop.steps": None})


def start(recipe: SmallRecipe, *, stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=recipe.folder,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        preexec_fn=hear,
    )
