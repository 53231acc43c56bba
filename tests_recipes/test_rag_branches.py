"""OpenAI's Agents SDK: a branch that samples the recorded answer again ends exactly as its trunk did."""

from pathlib import Path
from typing import Any

from tests.branched import assert_same_ending, branched

SMALL = ["loop.tasks_per_step=2", "loop.group_size=2", "trainer.threads=1"]


async def test_a_branch_that_samples_the_recorded_answer_again_ends_as_its_trunk(rag: Any, tmp_path: Path) -> None:
    pairs = await branched(rag.folder / "recipe.toml", tmp_path, overrides=SMALL)
    assert len(pairs) >= 8
    for trunk, branch in pairs:
        assert_same_ending(trunk, branch)
