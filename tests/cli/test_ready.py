"""A recipe that cannot run is refused before anything is loaded; broken lines of a task file are skipped."""

import io
import json
import tomllib
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from lightningrl.cli.ready import check_names, check_tasks
from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from tests.conftest import RECIPE, SmallRecipe

GOOD = [json.dumps({"input": {"question": f"say a word of {split}"}, "split": split}) for split in ("train", "heldout")]


def config(recipe: SmallRecipe, *lines: str) -> Config:
    (recipe.folder / "tasks.jsonl").write_text("\n".join(lines))
    return load_config(recipe.path, ["tasks.source=tasks.jsonl"])


def said(config: Config, *splits: str) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    try:
        check_tasks(config, splits, console=console)
    except UserError as error:
        console.print(f"error: {error.message}", soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_few_broken_lines_are_named_and_the_others_are_counted(small_recipe: SmallRecipe) -> None:
    lines = said(config(small_recipe, *GOOD, *(['{"inp'] * 1_207)), "heldout", "train")
    assert [line.partition(" is left out: ")[0].partition("` ")[2] for line in lines[:5]] == [
        f"line {number}" for number in range(3, 8)
    ]
    assert lines[5] == "warning: … and 1,202 more of this kind"
    assert lines[6].startswith("hint: a row is a line such as") and len(lines) == 7


def test_a_valid_file_has_no_warnings(small_recipe: SmallRecipe) -> None:
    assert said(config(small_recipe, *GOOD), "heldout", "train") == []


def test_warnings_about_lines_precede_the_error(small_recipe: SmallRecipe) -> None:
    first, hint, error = said(config(small_recipe, GOOD[0], '{"input": {}, "split": "held-out"}'), "heldout", "train")
    assert first.endswith(
        "line 2 is left out: there is no split `held-out`: did you mean `heldout`? known: `train`, `heldout`"
    )
    assert hint.startswith("hint:") and error.startswith("error: no task of split `heldout` in `")


def test_warnings_of_a_function_are_shown_in_the_same_way(small_recipe: SmallRecipe) -> None:
    warn = 'warnings.warn(f"row 7 of {split} is left out\\nhint: fix it", stacklevel=1)'
    small_recipe.rewrite_agent(
        lambda text: text.replace("    return [{", f"    import warnings; {warn}\n    return [{{")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing gets past
        assert said(load_config(small_recipe.path), "heldout", "train") == [
            "warning: row 7 of heldout is left out",
            "warning: row 7 of train is left out",
            "hint: fix it",
        ]


def test_tasks_that_are_in_both_splits_are_counted_and_one_is_shown(small_recipe: SmallRecipe) -> None:
    rows = [json.dumps({"input": {"b": number, "a": "x"}, "split": "train"}) for number in range(40)]
    rows += [json.dumps({"split": "heldout", "input": {"a": "x", "b": number}}) for number in range(37, 45)]
    warning, hint = said(config(small_recipe, *rows), "heldout", "train")
    assert warning == 'warning: 3 held-out tasks are also training tasks, such as `{"a":"x","b":37}`'
    assert hint.startswith("hint: held-out reward measures learning only if")
    assert said(config(small_recipe, *rows), "heldout") == [], "an evaluation trains on none"


def test_tasks_of_a_function_in_both_splits_are_counted(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(lambda text: text.replace(', "split": split}', "}"))
    warning, _ = said(load_config(small_recipe.path), "heldout", "train")
    assert warning == 'warning: 4 held-out tasks are also training tasks, such as `{"question":"say a word"}`'


@pytest.fixture
def broken(small_recipe: SmallRecipe) -> SmallRecipe:
    config(small_recipe, *GOOD, '{"input": ')
    return small_recipe


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_run_goes_on_with_the_good_lines(broken: SmallRecipe, command: str) -> None:
    done = broken.cli(command, str(broken.path), "tasks.source=tasks.jsonl", "loop.steps=1", "--json")
    assert done.returncode == 0, done.stderr
    first, *others = done.stderr.splitlines()
    assert first == f"warning: `{broken.folder}/tasks.jsonl` line 3 is left out: Input data was truncated"
    assert not any("left out" in line for line in others)
    assert json.loads(done.stdout.splitlines()[-1])["heldout_tasks" if command == "train" else "tasks"] == 1


def test_a_run_without_a_heldout_task_does_not_start(small_recipe: SmallRecipe, tmp_path: Path) -> None:
    config(small_recipe, GOOD[0])
    done = small_recipe.cli("train", str(small_recipe.path), "tasks.source=tasks.jsonl", "--run-dir", "run")
    assert done.returncode == 2 and "error: no task of split `heldout`" in done.stderr and "hint:" in done.stderr
    assert not (tmp_path / "run" / "store.sqlite").exists()


POLICIES = '[policies.solver]\nalgorithm = { advantage = "rloo" }\n[policies.critic]\n[[routes]]\npolicy = "solver"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with several policies; its agent is never run."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + POLICIES)
    return path


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("algorithm.credit=unifrm", "unknown credit `unifrm` in `algorithm.credit`", "did you mean `uniform`? known: "),
        (
            "algorithm.advantage=grppo",
            "unknown advantage `grppo` in `algorithm.advantage`",
            "did you mean `grpo`? known: ",
        ),
        (
            "trainer.name=remote",
            "unknown trainer `remote` in `trainer.name`",
            "known: `local`, `tinker`; or `pkg.module:attr`",
        ),
        ("engine.name=vlm", "unknown engine `vlm` in `engine.name`", "did you mean `vllm`?"),
        ("air=[{rule='tool_ok'}, {rule='slw'}]", "unknown air `slw` in `air.1.rule`", "did you mean `slow`?"),
        ("algorithm.credit=nowhere:credit", "`algorithm.credit`: no module `nowhere`", "beside the recipe"),
        ("algorithm.credit_options={discount=1.0}", "credit `uniform` has no option `discount`", "no options"),
        (
            "policies.solver.algorithm.credit=tree",
            "unknown credit `tree` in `policies.solver.algorithm.credit`",
            "`tree_loo`",
        ),
        (
            "policies.critic.algorithm={credit='gigpo', credit_options={discont=1}}",
            "`policies.critic.algorithm.credit_options`: ",
            "`discount`",
        ),
        (
            "policies.critic.algorithm.credit=discounted",
            "`policies.critic.algorithm.credit_options`: credit `discounted` needs `discount`",
            "set it",
        ),
        (
            "algorithm={credit='gigpo', credit_options={anchor='nowhere:state'}}",
            "algorithm.credit_options`: no module `nowhere` for anchor",
            "beside",
        ),
        (
            "algorithm={credit='gae_calls', credit_options={discount=0.9}, shaping='potential'}",
            "algorithm.credit_options`: `shaping` is `potential`",
            "`discount = 1`",
        ),
        (
            "policies.critic.trainer.name=remote",
            "unknown trainer `remote` in `policies.critic.trainer.name`",
            "known: `local`",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_known(
    recipe: Path, override: str, message: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_names(load_config(recipe, [override]))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_recipe_may_name_a_credit_of_its_own(recipe: Path) -> None:
    (recipe.parent / "own_credit_of_names.py").write_text("def half(group, *, share: float): ...\n")
    own = ["algorithm.credit=own_credit_of_names:half"]
    check_names(load_config(recipe, [*own, "algorithm.credit_options={share=0.5}"]))
    with pytest.raises(UserError, match="needs `share`"):
        check_names(load_config(recipe, own))


def test_a_dry_run_shows_all_settings_and_refuses_unknown_names(small_recipe: SmallRecipe) -> None:
    small_recipe.path.write_text(RECIPE + POLICIES)
    shown = small_recipe.cli("train", str(small_recipe.path), "--dry-run", "loss.clip_high=0.4")
    policies = tomllib.loads(shown.stdout)["policies"]
    assert [policies[name]["algorithm"]["advantage"] for name in ("solver", "critic")] == ["rloo", "grpo"]
    assert [policies[name]["loss"]["clip_high"] for name in ("solver", "critic")] == [0.4, 0.4]
    assert load_config(small_recipe.path, ["loss.clip_high=0.4"]).learners() == _reread(small_recipe, shown.stdout)

    as_json = small_recipe.cli("train", str(small_recipe.path), "--dry-run", "--json", "air=[{rule='slow', over=1.0}]")
    assert json.loads(as_json.stdout)["air"][0]["rule"] == "slow"

    for more in (["--dry-run"], ["--run-dir", "run"]):
        refused = small_recipe.cli("train", str(small_recipe.path), *more, "policies.solver.algorithm.advantage=rlo")
        assert refused.returncode == 2 and "did you mean `rloo`?" in refused.stderr
    assert not (small_recipe.folder / "run").exists()


def _reread(recipe: SmallRecipe, text: str) -> object:
    path = recipe.folder / "resolved.toml"
    path.write_text(text)
    return load_config(path).learners()
