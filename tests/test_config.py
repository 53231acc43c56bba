from pathlib import Path

import pytest

from lightningrl.config import dump_config, load_config
from lightningrl.errors import UserError

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
    config = load_config(recipe, ["trainer.learning_rate=1e-4", "loop.steps=3", "model.path=other", "routes=[{model='a*'}]"])
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
        ("loop.steps=-1", "`loop.steps`", "dry-run"),
        ("loop.steps='many'", "`loop.steps`", "dry-run"),
        ("agent.command=['python']", "either `entry` or `command`", "dry-run"),
        ("loop", "has no `=`", "trainer.learning_rate=1e-4"),
        ("name.x=1", "`name` in override `name.x=1` is a value", "dry-run"),
        ("routes=[{mdel='a'}]", "unknown key `routes.0.mdel`", "did you mean `model`?"),
    ],
)
def test_a_wrong_setting_is_named_with_a_hint(recipe: Path, override: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(recipe, [override])
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_missing_or_broken_recipe_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe at"):
        load_config(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = \n")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(broken)


def test_there_are_at_most_eighty_settings_and_each_says_what_it_means() -> None:
    from pydantic import BaseModel

    from lightningrl.config import Config

    def leaves(section: type[BaseModel], prefix: str = "") -> list[tuple[str, str | None]]:
        found: list[tuple[str, str | None]] = []
        for name, field in section.model_fields.items():
            kind = field.annotation
            inner = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
            found += leaves(inner, f"{prefix}{name}.") if inner else [(prefix + name, field.description)]
        return found

    settings = leaves(Config)
    assert len(settings) <= 80
    assert [name for name, description in settings if not description] == []
