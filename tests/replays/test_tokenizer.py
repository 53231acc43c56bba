"""Which tokenizer made the prompts of a run?"""

from pathlib import Path

import pytest

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from lightningrl.replays.tokenizer import tokenizer_folder
from tests.replays.recorded import write


def touched(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").touch()
    return folder


def recipe(folder: Path) -> Config:
    write(folder)
    return load_config(folder, ["model.path=base"])


@pytest.mark.parametrize("place", ["model", "model/critic", "checkpoints/step-00004", "checkpoints/step-00004/critic"])
def test_the_copy_of_the_run_comes_before_the_model_of_the_recipe(tmp_path: Path, place: str) -> None:
    config = recipe(tmp_path / "recipe")
    named, run = touched(config.root / "base"), tmp_path / "run"
    assert tokenizer_folder(config, run) == named
    own = touched(run / place)
    assert tokenizer_folder(config, run) == own


def test_if_there_is_none_the_files_to_copy_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the tokenizer of .* is missing: `base` has none") as refused:
        tokenizer_folder(recipe(tmp_path / "recipe"), tmp_path / "run")
    assert "tokenizer.json, tokenizer_config.json and chat_template.jinja" in (refused.value.hint or "")
