"""A branch that samples the recorded answer again ends exactly as its trunk did: for every call of a batch of a recipe.

`tests_recipes` has the recipes that need other environments or Node.
"""

from pathlib import Path

import pytest

from tests.branched import assert_same_ending, branched

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["loop.tasks_per_step=2", "loop.group_size=2", "trainer.threads=1"]
"""Four rollouts and their branches take seconds."""


@pytest.mark.parametrize("recipe", ["sql_langgraph", "errands", "from_scratch", "multi_agent"])
async def test_a_branch_that_samples_the_recorded_answer_again_ends_as_its_trunk(recipe: str, tmp_path: Path) -> None:
    pairs = await branched(RECIPES / recipe / "recipe.toml", tmp_path, overrides=SMALL)
    assert len(pairs) >= 8
    for trunk, branch in pairs:
        assert_same_ending(trunk, branch)
