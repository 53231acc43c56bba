"""A learner with records of older weights."""

import math
from dataclasses import replace

import pytest

from lightningrl.conformance import SilentWatcher
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from tests.conftest import SmallRecipe


@pytest.mark.parametrize("proximal", [True, False])
async def test_proximal_logprobs_are_those_of_the_weights_that_a_batch_is_first_learnt_by(
    small_recipe: SmallRecipe, proximal: bool
) -> None:
    overrides = [f"loss.proximal={str(proximal).lower()}", "trainer.minibatches=1"]
    async with lightning(load_config(small_recipe.path, overrides), small_recipe.folder) as server:
        loop, (learner,) = server.loop(SilentWatcher()), server.learners
        await loop.restore()
        lessons, _ = await loop.credit(0, await loop.collect(0))
        older = [
            replace(lesson, transition=replace(lesson.transition, logprobs=lesson.transition.logprobs + 1))
            for lesson in lessons["policy"]
        ]
        await learner.engine.pause()
        found, _ = await learner.update(older, seed=0, remaining=1.0)
    assert found["loss/ratio_mean"] == pytest.approx(1.0 if proximal else math.exp(-1), rel=1e-4)


async def test_calls_are_learnt_from_until_they_are_too_old(small_recipe: SmallRecipe) -> None:
    async with lightning(
        load_config(small_recipe.path, ["loop.max_off_policy_steps=3"]), small_recipe.folder
    ) as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        batch = await loop.collect(0)
        assert (await loop.credit(3, batch))[1]["tokens/trained"] > 0
        assert (await loop.credit(3, batch))[1]["tasks/heldout"] == 0.0
        with pytest.raises(UserError, match="`stale`"):
            await loop.credit(4, batch)


async def test_training_tasks_that_are_held_out_are_counted(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(
        lambda text: text.replace(
            '["say a word", "pick one colour"][i % 2], "split": split', 'i if split == "heldout" else 3 + i'
        )
    )
    small_recipe.rewrite_agent(lambda text: text.replace('task["question"]', 'str(task["question"])'))
    async with lightning(load_config(small_recipe.path), small_recipe.folder) as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        _, metrics = await loop.credit(0, await loop.collect(0))
    assert (metrics["tasks/count"], metrics["tasks/heldout"]) == (2.0, 1.0), "trained: 3 and 4; held out: 0 to 3"
