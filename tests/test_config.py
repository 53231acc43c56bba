import re
import shutil
from pathlib import Path

import pytest

from lightningrl.cli.settings import settings_page
from lightningrl.config import AgentConfig, Config, EngineConfig, ModelConfig
from lightningrl.errors import UserError
from lightningrl.recipe import dump_config, load_config

RECIPE = """
name = "small"
[agent]
entry = "agent:run"
reward = "agent:reward"
[tasks]
source = "agent:tasks"
[model]
path = "model"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_overrides_are_laid_over_the_recipe(recipe: Path) -> None:
    config = load_config(
        recipe, ["trainer.learning_rate=1e-4", "loop.steps=3", "model.path=other", "routes=[{model='a*'}]"]
    )
    assert config.trainer.learning_rate == 1e-4
    assert config.loop.steps == 3
    assert config.model.path == "other"
    assert config.routes[0].model == "a*"


def test_paths_are_looked_up_beside_the_recipe(recipe: Path) -> None:
    assert load_config(recipe).root == recipe.parent.resolve()


def test_dumped_config_reads_back_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["seed=7", "agent.env={A='b'}"])
    again = tmp_path / "elsewhere" / "config.toml"
    again.parent.mkdir()
    again.write_text(dump_config(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("trainer.learning_rte=1", "unknown key `trainer.learning_rte`", "did you mean `learning_rate`?"),
        ("trainers.x=1", "unknown key `trainers`", "did you mean `trainer`?"),
        ("trainer=3", "`trainer` in `RECIPE` should be a section, not `3`", "`lightningrl settings`"),
        (
            "loop.steps=-1",
            "`loop.steps` in `RECIPE` is `-1`: it should be greater than or equal to 0",
            "Number of batches",
        ),
        ("loop.steps='many'", "`loop.steps` in `RECIPE` is `many`: it should be a valid integer", "Number of batches"),
        ("name='../x'", "`name` in `RECIPE`: `../x` cannot name a folder", "Name of the run's folder"),
        ("name='a/b'", "`a/b` cannot name a folder", "Name of the run's folder"),
        ("name='a*'", "`a*` cannot name a folder", "Name of the run's folder"),
        ("name='.hidden'", "`.hidden` cannot name a folder", "Name of the run's folder"),
        ("name=''", "`` cannot name a folder", "Name of the run's folder"),
        ("model={}", "`model.path` is missing", "A Hugging Face folder"),
        ("agent.command=['python']", "`agent` in `RECIPE`: give either `entry` or `command`", "`lightningrl settings`"),
        (
            "agent.reward_range=[1, 0]",
            "`agent.reward_range` in `RECIPE`: `[1, 0]` is not from low to high",
            "`[lowest, highest]`",
        ),
        ("agent.reward_range=[1, 1]", "`[1, 1]` is not from low to high", "`[lowest, highest]`"),
        (
            "agent.reward_range=[0, inf]",
            "`agent.reward_range` in `RECIPE` is `inf`: it should be a finite number",
            "`[lowest, highest]`",
        ),
        ("agent.reward_range=[0]", "`agent.reward_range` in `RECIPE`", "`[lowest, highest]`"),
        ("agent.reward_range=1", "`agent.reward_range` in `RECIPE` is `1`", "`[lowest, highest]`"),
        ("loop", "has no `=`", "trainer.learning_rate=1e-4"),
        ("name.x=1", "`name` in override `name.x=1` is a value", "dry-run"),
        ("routes=[{mdel='a'}]", "unknown key `routes.0.mdel`", "did you mean `model`?"),
        (
            "routes=[{policy='polcy'}]",
            "no policy `polcy` for `routes.0.policy`",
            "did you mean `policy`? known: `policy`, `frozen`",
        ),
        ("air=[{rul='slow'}]", "unknown key `air.0.rul`", "did you mean `rule`?"),
        ("air=[{rule='slow', cap=0}]", "`air.0.cap` in `RECIPE` is `0`", "against reward hacking"),
        ("upstreams.a.urll='x'", "unknown key `upstreams.a.urll`", "did you mean `url`?"),
        ("gateway.embeddings='upstreams.x'", "no `[upstreams.x]` for `gateway.embeddings`", "known: none"),
        ("preset=dappo", "unknown preset `dappo`", "did you mean `dapo`? known: `grpo`"),
        ("preset=[1]", "unknown preset `[1]`", "known: `grpo`"),
        (
            "loss.name=ppo_clp",
            "`loss.name` in `RECIPE` cannot be `ppo_clp`",
            "did you mean `ppo_clip`? known: `ppo_clip`, `cispo`, `pg`",
        ),
        (
            "algorithm.aggregation=rows",
            "`algorithm.aggregation` in `RECIPE` cannot be `rows`",
            "known: `rollout-mean`, `call-mean`, `token-mean`",
        ),
        (
            "trainer.device=gpu:1",
            "`trainer.device` in `RECIPE`: `gpu:1` is none of `auto`, `cpu`, `cuda` and `cuda:1`",
            "`cuda:1`: on the second",
        ),
        (
            "engine.cache_gib=-1",
            "`engine.cache_gib` in `RECIPE` is `-1`: it should be 'auto' or greater than 0",
            "GiB of keys and values",
        ),
        (
            "trainer.max_tokens=lots",
            "`trainer.max_tokens` in `RECIPE` is `lots`: it should be 'auto' or a valid integer",
            "Most unique tokens",
        ),
        (
            "air=[{rule='slow', value=nan}]",
            "`air.0.value` in `RECIPE` is `nan`: it should be a finite number",
            "Reward when the rule holds",
        ),
        (
            "trainer.learning_rate=inf",
            "`trainer.learning_rate` in `RECIPE` is `inf`: it should be a finite number",
            "Peak learning rate",
        ),
        ("loss={name='pg', ratio='call'}", "`loss` in `RECIPE`: `pg` does not clip", "`lightningrl settings`"),
        (
            "algorithm.credit_options={discount=[1]}",
            "`algorithm.credit_options.discount` in `RECIPE`",
            "Parameters of the credit",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_a_hint(recipe: Path, override: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [override])
    assert message.replace("RECIPE", str(recipe)) in caught.value.message
    assert hint in (caught.value.hint or "")
    assert len(caught.value.message) < 200 and "Value error" not in caught.value.message


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("policies.solver.loss.clip_lo=1", "unknown key `policies.solver.loss.clip_lo`", "did you mean `clip_low`?"),
        ("policies.solver.los.clip_low=1", "unknown key `policies.solver.los`", "did you mean `loss`? known: `model`"),
        (
            "policies.solver.loss.name=pgg",
            "`policies.solver.loss.name` in `RECIPE` cannot be `pgg`",
            "did you mean `pg`?",
        ),
        (
            "policies.solver.trainer.learning_rate=-1",
            "`policies.solver.trainer.learning_rate` in `RECIPE` is `-1`",
            "AdamW",
        ),
        (
            "policies.solver.model=3",
            "`policies.solver.model` in `RECIPE` should be a section, not `3`",
            "`lightningrl settings`",
        ),
        ("policies.solver.preset=dapoo", "unknown preset `dapoo` (`policies.solver.preset`)", "did you mean `dapo`?"),
        (
            "policies.solver=3",
            "`policies.solver` in `RECIPE` should be a section, not `3`",
            "policies that are trained",
        ),
        ("policies.frozen={}", "a policy cannot be named `frozen`", "letters, digits"),
        ("policies={'a/b' = {}}", "a policy cannot be named `a/b`", "letters, digits"),
    ],
)
def test_a_wrong_setting_of_a_policy_is_named_by_its_whole_key(
    recipe: Path, override: str, message: str, hint: str
) -> None:
    recipe.write_text(RECIPE + '[policies.solver]\n[policies.critic]\n[[routes]]\npolicy = "solver"\n')
    test_a_wrong_setting_is_named_with_a_hint(recipe, override, message, hint)


def test_a_missing_or_broken_recipe_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe at"):
        load_config(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = \n")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(broken)


def test_an_agent_cannot_ask_for_the_key_of_an_upstream(recipe: Path) -> None:
    with pytest.raises(UserError, match="names `KEY`, which holds the key of an upstream") as raised:
        load_config(
            recipe, ["upstreams.judge={url='http://judge/v1', key_env='KEY'}", "agent.inherit_env=['OTHER', 'KEY']"]
        )
    assert "the gateway adds this key" in (raised.value.hint or "")


def test_there_are_at_most_130_settings_and_each_says_what_it_means() -> None:
    """`[policies.NAME]` repeats settings of other sections; it counts as one."""
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| .* \| (.*) \|$", settings_page(), re.MULTILINE)
    assert len(rows) <= 130
    assert [name for name, meaning in rows if not meaning] == []
    assert [name for name, _ in rows if name.startswith("policies")] == ["policies"]


def test_the_python_of_vllm_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(python: str) -> str:
        return Config(
            name="x",
            root=tmp_path,
            agent=AgentConfig(entry="agent:run"),
            model=ModelConfig(path="m"),
            engine=EngineConfig(python=python),
        ).vllm_python

    monkeypatch.setenv("HOME", "/home/me")
    assert found("") == ""
    assert found("env/bin/python") == str(tmp_path / "env/bin/python")
    assert found("~/env/bin/python") == "/home/me/env/bin/python"
    assert found("/env/bin/python") == "/env/bin/python"
    assert found("sh") == shutil.which("sh")


def test_the_tools_of_a_program_cannot_be_withheld(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('entry = "agent:run"', 'command = ["node", "agent.mjs"]'))
    load_config(tmp_path / "recipe.toml", ["replay.tools=safe"])
    with pytest.raises(UserError, match="needs an agent that is a Python function") as raised:
        load_config(tmp_path / "recipe.toml", ["replay.tools=never"])
    assert "out of reach" in (raised.value.hint or "")
