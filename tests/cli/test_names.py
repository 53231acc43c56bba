"""What a recipe names is there, or the run is refused before it begins."""

import json
import tomllib
from pathlib import Path

import pytest

from lightningrl.cli.names import check_names
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from tests.conftest import RECIPE, SmallRecipe

POLICIES = '[policies.solver]\nalgorithm = { advantage = "rloo" }\n[policies.critic]\n[[routes]]\npolicy = "solver"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """With several policies; its agent is never run."""
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
        ("trainer.name=remote", "unknown trainer `remote` in `trainer.name`", "known: `local`; or `pkg.module:attr`"),
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


def test_a_recipes_own_credit_is_as_good_as_one_that_is_built_in(recipe: Path) -> None:
    (recipe.parent / "own_credit_of_names.py").write_text("def half(group, *, share: float): ...\n")
    own = ["algorithm.credit=own_credit_of_names:half"]
    check_names(load_config(recipe, [*own, "algorithm.credit_options={share=0.5}"]))
    with pytest.raises(UserError, match="needs `share`"):
        check_names(load_config(recipe, own))


def test_a_dry_run_shows_every_setting_of_every_policy_and_refuses_what_a_run_would(small_recipe: SmallRecipe) -> None:
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
