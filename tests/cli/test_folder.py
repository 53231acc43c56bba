"""Which settings may change when a run is resumed?"""

from pathlib import Path

import pytest

from lightningrl.cli.folder import new_folder, resumed_folder
from lightningrl.errors import UserError
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
