"""`lightningrl replay` from the command line: what it prints, its exit codes, and bad input."""

import json
import shutil
from pathlib import Path

import pytest

from lightningrl.cli.replay import ReplayOptions
from lightningrl.errors import UserError
from tests.command import run_command
from tests.conftest import SmallRecipe
from tests.replays.recorded import FAILED, Recorded, record

FIRST = "train-00000-000-00"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("recorded"))


def refused(recorded: Recorded, *arguments: str) -> str:
    done = run_command("replay", str(recorded.run), *arguments, cwd=recorded.run)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "error:" in done.stderr and "hint:" in done.stderr
    return " ".join(done.stderr.split())


def test_a_replay_that_goes_the_same_way_exits_with_0(recorded: Recorded) -> None:
    done = run_command("replay", str(recorded.run), FIRST, "--json", cwd=recorded.run)
    assert done.returncode == 0, done.stderr
    assert "✓ the agent went the same way" in done.stderr and json.loads(done.stdout)["same"] is True


def test_a_replay_of_a_changed_agent_exits_with_1_and_names_the_place(recorded: Recorded, tmp_path: Path) -> None:
    changed = recorded.changed(tmp_path / "copy", "to go", "left")
    done = run_command("replay", str(recorded.run), "--all", changed, "--json", cwd=recorded.run)
    assert done.returncode == 1, done.stderr
    assert "0 of 4 rollouts go the same way" in done.stderr
    assert f"see one: lightningrl replay {recorded.run} {FIRST} {changed}" in " ".join(done.stderr.split())
    [group] = json.loads(done.stdout)["parted"]
    assert group["call"] == 2 and group["kind"] == "request" and len(group["rollouts"]) == 4


def test_an_error_of_the_agent_is_printed_once(recorded: Recorded, tmp_path: Path) -> None:
    changed = recorded.changed(tmp_path / "copy", "return {", "raise KeyError('oh')\n    return {")
    done = run_command("replay", str(recorded.run), FIRST, changed, cwd=recorded.run)
    assert done.returncode == 1 and done.stdout.count("AgentError: KeyError: 'oh'") == 1
    assert "KeyError: 'oh': " not in done.stdout


def test_both_endings_are_shown_in_80_columns(recorded: Recorded) -> None:
    done = run_command("replay", str(recorded.run), FIRST, "--at", "2", "--answer", "10", cwd=recorded.run)
    assert done.returncode == 0, done.stderr
    assert '{"total": 3}' in done.stdout and '{"total": 12}' in done.stdout
    assert "reward: 1 recorded, 0 with the other answer" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train-00000-000-01",), "did you mean `train-00000-000-00`?"),
        ((FAILED,), f"rollout `{FAILED}` failed: AgentError: ValueError"),
        ((FIRST, "--attempt", "2"), "has no attempt `2`"),
        ((FIRST, "agent.entry=agnet:run"), "no module `agnet`"),
        ((FIRST, "agent.reward=agent:nothing"), "nothing"),
        ((FIRST, "root=/nowhere/at/all"), "the recipe's folder `/nowhere/at/all` is gone"),
        ((FIRST, "agent.timeout=4"), "unknown key `agent.timeout`"),
        ((FIRST, "engine.name=vllm"), "`lightningrl replay` starts no vLLM"),
        ((FIRST, "engine.urls=['http://127.0.0.1:9/v1']"), "`engine.urls` needs `engine.name`"),
        ((FIRST, "--at", "2", "--samples", "1", "--checkpoint", "gone"), "`scripts:ones` answers"),
        ((FIRST, "--at", "99", "--answer", "1"), "has no call 99: it has calls 1 to 3"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_a_hint(
    recorded: Recorded, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(recorded, *arguments)


def test_the_folder_of_another_recipe_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    root = recorded.changed(tmp_path / "copy", "to go", "left")
    recipe = tmp_path / "copy" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('"sums"', '"products"'))
    assert "has the recipe `products`, and the run is of `sums`" in refused(recorded, FIRST, root)


def test_a_folder_that_is_no_run_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    assert "no records at" in refused(Recorded(run=tmp_path, recipe=recorded.recipe), FIRST)
    shutil.copy(recorded.run / "store.sqlite", tmp_path)
    assert "has no config.toml" in refused(Recorded(run=tmp_path, recipe=recorded.recipe), FIRST)


def options(**given: object) -> ReplayOptions:
    names = ("rollout", "attempt", "at", "answer", "samples", "checkpoint", "split", "step", "limit")
    plain = {"run_dir": Path("run"), "overrides": (), "no_engine": False, "every": False, **dict.fromkeys(names)}
    return ReplayOptions(**{**plain, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give either one rollout or `--all`"),
        ({"rollout": "r", "every": True}, "give either one rollout or `--all`"),
        ({"rollout": "r", "split": "train"}, "`--split` needs `--all`"),
        ({"every": True, "at": 1, "answer": "x"}, "`--at` needs `ROLLOUT`"),
        ({"rollout": "r", "answer": "x"}, "`--answer` needs `--at`"),
        ({"rollout": "r", "at": 1}, "`--at 1` needs another answer"),
        ({"rollout": "r", "at": 1, "answer": "x", "samples": 2}, "`--at 1` needs another answer"),
        ({"rollout": "r", "at": 1, "samples": 2, "no_engine": True}, "`--no-engine` needs `--answer`"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match="^" + said.replace("-", r"\-").replace(".", r"\.")):
        options(**given).check()


def test_the_weights_that_answered_answer_again_and_are_named_if_they_are_gone(small_recipe: SmallRecipe) -> None:
    small_recipe.train("--run-dir", "run", "loop.steps=1", "tasks.heldout=2")
    sampling = ("replay", "run", "exam-00001-sampled-0000", "--at", "2", "--samples", "2", "--json")
    done = small_recipe.cli(*sampling)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["others"]) == 2 and found["interval"] is not None
    for name in ("checkpoints/step-00001", "model"):
        shutil.rmtree(small_recipe.folder / "run" / name)
    gone = small_recipe.cli(*sampling)
    assert gone.returncode == 2 and "version 1 of `policy`, which answered, is gone" in gone.stderr
    alone = small_recipe.cli("replay", "run", "exam-00001-sampled-0000", "--json")
    assert alone.returncode == 0, "records alone need no weights"
