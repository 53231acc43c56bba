"""Do the branches of a real step hold invariants 1 to 3, and what does an agent cost that goes another way?"""

from pathlib import Path

import pytest

from lightningrl.conformance import SilentWatcher, check, collected
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from tests.conftest import AGENT, RECIPE

FORKS = ["loop.fork_share=0.5", "algorithm.credit=fork", "loop.group_size=8"]


@pytest.fixture
def recipe(tmp_path: Path, model_folder: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "model").symlink_to(model_folder)
    return tmp_path / "recipe.toml"


class Told(SilentWatcher):
    def __init__(self) -> None:
        self.void: list[tuple[int, str]] = []

    def voided(self, step: int, why: str) -> None:
        self.void.append((step, why))


async def test_each_token_of_trunks_and_branches_is_sampled_and_trained_once(recipe: Path) -> None:
    batch = await collected(recipe, recipe.parent / "run", overrides=FORKS)
    check(batch)
    branches = [rollout for rollout in batch.rollouts if rollout.branch is not None]
    assert [rollout.status for rollout in branches] == ["succeeded"] * 8
    played = [call for call in batch.calls if call.replays is not None]
    assert played and {call.attempt_id for call in played} < {rollout.accepted_attempt_id for rollout in branches}
    assert len(batch.heard) == len(batch.calls) - len(played)
    assert not any("replayed" in reasons for reasons in batch.left_out.values())


async def test_an_agent_that_asks_differently_each_time_voids_its_branches_and_the_step_goes_on(recipe: Path) -> None:
    clock = AGENT.replace(
        '"content": task["question"]', '"content": task["question"] + str(__import__("time").time_ns())'
    )
    (recipe.parent / "agent.py").write_text(clock)
    told = Told()
    config = load_config(recipe, [*FORKS, "agent.max_attempts=2"])
    (recipe.parent / "run").mkdir()
    async with lightning(config, recipe.parent / "run") as server:
        loop = server.loop(told)
        await loop.restore()
        batch = await loop.collect(0)
        lessons, metrics = await loop.credit(0, batch)
        attempts = await server.store.attempts([rollout.id for rollout in batch if rollout.branch is not None])
    assert metrics["forks/branches"] == metrics["forks/void"] == metrics["rollouts/excluded"] == 8
    assert metrics["rollouts/succeeded"] == 8 and metrics["tokens/replayed"] == 0
    assert metrics["tokens/sampled"] == sum(len(lesson.weights) for lesson in lessons["policy"])
    assert [attempt.status for attempt in attempts] == ["failed"] * 16, "each is tried again"
    assert all((attempt.error or "").startswith("void: call 1 differs from the record: ") for attempt in attempts)
    [(step, why)] = told.void
    assert step == 0 and "` is void: call 1 differs from the record: " in why and "\n" not in why
