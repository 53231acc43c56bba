"""Invariants 1 to 3 for each recipe: a batch through the recipe's own SDK and real sockets is trained token for token
as it was served. `tests_recipes` has the recipes that need other environments or Node.
"""

from collections import Counter
from pathlib import Path

import pytest

from lightningrl.conformance import check, collected
from lightningrl.types import Capture

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["loop.tasks_per_step=3", "loop.group_size=4", "trainer.threads=1"]


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("sql_langgraph/recipe.toml", 0),
        ("errands/recipe.toml", 0),
        ("from_scratch/recipe.toml", 0),
        ("multi_agent/recipe.toml", 0),
        ("multi_agent/lora.toml", 1),  # a new adapter changes nothing
    ],
)
async def test_every_token_that_was_served_is_learnt_from_as_it_was(recipe: str, steps: int, tmp_path: Path) -> None:
    batch = await collected(RECIPES / recipe, tmp_path, overrides=SMALL, steps=steps)
    check(batch)
    captures = Counter[Capture](call.capture for call in batch.calls)
    assert captures.keys() == {"rendered", "bridged"}, [
        call.capture_reason for call in batch.calls if call.capture_reason
    ]
    assert captures["bridged"] > 2
    assert (
        {trained.policy for trained in batch.trained} == {call.policy for call in batch.calls} == batch.left_out.keys()
    )
