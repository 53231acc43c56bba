"""The example of docs/python.md, in a running event loop as in a notebook, on a real training."""

import asyncio
import runpy
from pathlib import Path

import pytest

from lightningrl.errors import UserError
from lightningrl.notebook import Run, open
from lightningrl.notebook.rollout import ShownRollout
from lightningrl.notebook.tokens import Token
from tests.conftest import SmallRecipe

EXAMPLE = Path(__file__).with_name("example.py")
SAME = ("loop.steps=2", "loop.group_size=6", "tasks.heldout=4")


async def test_training_and_reading_work_in_a_running_event_loop(
    small_recipe: SmallRecipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert asyncio.get_running_loop().is_running()
    monkeypatch.chdir(small_recipe.folder)
    found = runpy.run_path(str(EXAMPLE))
    told = capfd.readouterr()
    assert "step   2/2" in told.err and told.out == "", "progress is on stderr, as without a notebook"
    run, rollout = found["run"], found["rollout"]
    assert run.path.parent == Path("runs") and run.state == "complete"
    assert list(found["rewards"]) == [1, 2] and len(found["curve"]) == 2 + 4 and len(found["entropy"]) == 2
    assert found["best"].reward == max(point.reward for point in found["curve"])
    rewards = [row.reward for row in found["worst"]]
    assert rewards == sorted(rewards) and len(found["failed"]) == 0
    assert all(row.step == 1 and row.split == "train" and 0.5 <= row.reward <= 1 for row in found["good"])
    assert len(found["blue"]) and all("blue" in row.said for row in found["blue"])
    assert isinstance(rollout, ShownRollout) and rollout.reward == rewards[0]
    assert found["question"] in ("say a word", "pick one colour") and found["answers"][-1] == rollout.output
    assert found["surprise"].logprob < 0 and found["pushed_up"] == [], "the worst rollout becomes less likely"
    assert "".join(text or "" for text in found["tokens"].texts).startswith(found["answers"][1])
    assert found["group_size"] == 6 and len(found["table"]) == 2 * 2 * 6 + 4 * 4
    means = {point.step: point.reward for point in found["curve"] if point.kind == "step"}
    assert found["by_step"].to_dict() == pytest.approx(means)
    for shown in (run, found["curve"], found["worst"], rollout, rollout.calls[0], found["tokens"], run.health()):
        assert "<script" not in shown._repr_html_() and len(repr(shown)) < 4000
    measured = [token for row in run.rollouts(split="train", limit=None) for token in _tokens(run, row.id)]
    assert measured and all((token.entropy or 0) > 0 and (token.ratio or 0) > 0 for token in measured)
    _the_weights_are_those_of_the_command_line(small_recipe, run)


def _tokens(run: Run, rollout_id: str) -> list[Token]:
    """The tokens of a rollout whose entropy was measured."""
    calls = run.rollout(rollout_id).calls
    return [token for call in calls for token in call.tokens if token.entropy is not None]


def _the_weights_are_those_of_the_command_line(recipe: SmallRecipe, run: Run) -> None:
    recipe.train("--run-dir", "by_command", *SAME)
    trained, same = (path / "model" / "model.safetensors" for path in (run.path, recipe.folder / "by_command"))
    assert trained.read_bytes() == same.read_bytes()
    assert trained.read_bytes() != (recipe.folder / "model" / "model.safetensors").read_bytes()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run") as wrong:
        open(tmp_path)
    assert wrong.value.hint
