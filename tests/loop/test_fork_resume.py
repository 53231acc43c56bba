"""A run with branches that is stopped and resumed: the same rollouts, the same places, the same weights."""

import hashlib
from pathlib import Path

import pytest

from lightningrl.conformance import SilentWatcher
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.types import Rollout
from tests.conftest import SmallRecipe

FORKS = [
    "loop.fork_share=0.5",
    "loop.forks=1",
    "loop.fork_at=variance",
    "loop.group_size=8",
    "loop.tasks_per_step=1",
    "algorithm.credit=fork",
    "agent.concurrency=2",
    "tasks.heldout=1",
]


class Stops(SilentWatcher):
    """Stops a run when half of the second step's branches have ended."""

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        if what.startswith("step 2, branches") and 2 * done >= total:
            raise InterruptedError

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        assert step == 0, "the run goes on"


async def finished(recipe: SmallRecipe, folder: Path) -> tuple[list[Rollout], str]:
    """Run or resume; the rollouts, and the SHA-256 of the final weights."""
    async with lightning(load_config(recipe.path, FORKS), folder) as server:
        await server.loop(SilentWatcher()).run()
        await server.export(folder / "model")
        rollouts = await server.store.rollouts()
    return rollouts, hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


async def test_a_run_stopped_among_its_branches_ends_as_one_that_was_not(small_recipe: SmallRecipe) -> None:
    whole, stopped = small_recipe.folder / "whole", small_recipe.folder / "stopped"
    whole.mkdir()
    stopped.mkdir()
    async with lightning(load_config(small_recipe.path, FORKS), stopped) as server:
        with pytest.raises(InterruptedError):
            await server.loop(Stops()).run()
    async with lightning(load_config(small_recipe.path, FORKS), stopped) as server:
        branches = [rollout for rollout in await server.store.rollouts() if rollout.id.startswith("train-00001-")]
        ended = [rollout.status == "succeeded" for rollout in branches if rollout.branch is not None]
    assert 0 < sum(ended) < len(ended)
    rollouts, weights = await finished(small_recipe, whole)
    assert sum(rollout.branch is not None for rollout in rollouts) > 4
    again, same = await finished(small_recipe, stopped)
    assert [rollout.id for rollout in again] == [rollout.id for rollout in rollouts]
    assert same == weights


async def test_a_trunk_that_succeeds_after_a_restart_does_not_move_the_branches(small_recipe: SmallRecipe) -> None:
    first = '    global client\n    if not Path("mended").exists() and not failed:\n        failed.append(task)\n'
    raises = '        raise RuntimeError("not yet")\n'
    small_recipe.rewrite_agent(
        lambda text: text.replace("    global client\n", first + raises).replace(
            "client = None\n", "from pathlib import Path\nfailed = []\nclient = None\n", 1
        )
    )
    folder = small_recipe.folder / "run"
    folder.mkdir()
    config = load_config(small_recipe.path, [*FORKS, "agent.max_attempts=1"])
    batches: list[list[Rollout]] = []
    for _ in range(2):
        async with lightning(config, folder) as server:
            loop = server.loop(SilentWatcher())
            await loop.restore()
            batches.append(await loop.collect(0))
        (small_recipe.folder / "mended").touch()
    before, after = ([rollout for rollout in batch if rollout.branch is not None] for batch in batches)
    assert [rollout.status for rollout in batches[0] if rollout.branch is None].count("failed") == 1
    assert all(rollout.status == "succeeded" for rollout in batches[1])
    assert after == before != []


async def test_siblings_are_compared_by_the_reward_that_is_learnt(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace("return len(answer) % 5 / 4", 'return {"final": 0.5, "length": float(len(answer))}')
    )
    overrides = [*FORKS, "algorithm.reward=length", "loop.forks=2"]
    folder = small_recipe.folder / "run"
    folder.mkdir()
    async with lightning(load_config(small_recipe.path, overrides), folder) as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        await loop.collect(0)
        known = await loop.rollouts._differences_before(1)  # pyright: ignore[reportPrivateUsage]
    assert sum(differed for differed, _ in known.counts.values()) > 0
    assert sum(places for _, places in known.counts.values()) == 2
