"""Several policies are trained in the same rollouts, each from its own calls."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lightningrl.config import Config
from lightningrl.conformance import SilentWatcher
from lightningrl.data.forest import Forest
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.trainer.base import Evaluation, Trainer
from lightningrl.types import Call
from tests.conftest import SmallRecipe

POLICIES = """
[policies.asker]
[policies.picker]
trainer = { learning_rate = 3e-3, minibatches = 1 }
algorithm = { advantage = "rloo" }
[[routes]]
model = "asker"
policy = "asker"
[[routes]]
model = "picker"
policy = "picker"
"""


@pytest.fixture
def recipe(small_recipe: SmallRecipe) -> SmallRecipe:
    """The first turn requests `asker`, the second `picker`."""
    small_recipe.rewrite_agent(lambda text: text.replace('model="policy"', 'model="asker" if follow_up else "picker"'))
    small_recipe.path.write_text(small_recipe.path.read_text() + POLICIES)
    return small_recipe


async def learn(config: Config, folder: Path) -> list[Call]:
    """Ids of the calls that were trained."""
    folder.mkdir(exist_ok=True)
    async with lightning(config, folder) as server:
        await server.loop(SilentWatcher()).run()
        await server.export(folder / "model")
        rollouts = [rollout for rollout in await server.store.rollouts() if rollout.id.startswith("train")]
        return await server.store.calls([rollout.accepted_attempt_id or "" for rollout in rollouts])


def digest(folder: Path) -> str:
    """SHA-256 of the weights in a model folder."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


async def test_each_policy_learns_from_its_own_calls_and_has_its_own_versions(recipe: SmallRecipe) -> None:
    run = recipe.folder / "run"
    calls = await learn(load_config(recipe.path), run)
    assert {(call.agent, call.policy, call.policy_version) for call in calls} == {
        (p, p, v) for p in ("asker", "picker") for v in (0, 1)
    }
    start, asker, picker = (
        digest(recipe.folder / "model"),
        digest(run / "model" / "asker"),
        digest(run / "model" / "picker"),
    )
    assert len({start, asker, picker}) == 3


async def test_a_policy_whose_calls_do_not_teach_stays_bit_for_bit_what_it_was(recipe: SmallRecipe) -> None:
    recipe.path.write_text(recipe.path.read_text() + "train = false\n")
    run = recipe.folder / "run"
    await learn(load_config(recipe.path), run)
    assert (
        digest(run / "model" / "picker")
        == digest(run / "checkpoints" / "step-00001" / "picker")
        == digest(recipe.folder / "model")
    )
    assert digest(run / "model" / "asker") != digest(recipe.folder / "model")


async def test_what_one_policy_learns_does_not_depend_on_how_another_is_trained(recipe: SmallRecipe) -> None:
    """Both policies after one step on the same rollouts."""
    for name, rate in (("fast", 1e-2), ("slow", 1e-5)):
        await learn(
            load_config(recipe.path, ["loop.steps=1", f"policies.picker.trainer.learning_rate={rate}"]),
            recipe.folder / name,
        )
    fast, slow = recipe.folder / "fast" / "model", recipe.folder / "slow" / "model"
    assert digest(fast / "asker") == digest(slow / "asker")
    assert digest(fast / "picker") != digest(slow / "picker")


async def test_a_run_that_ended_between_two_publications_goes_on_bit_for_bit(recipe: SmallRecipe) -> None:
    config = load_config(recipe.path)
    await learn(config, recipe.folder / "straight")

    halted = recipe.folder / "halted"
    await learn(load_config(recipe.path, ["loop.steps=1"]), halted)
    async with lightning(config, halted) as server:
        asker = server.learners[0]
        await asker.load(asker.weights(1))
        await asker.save(asker.weights(2))  # as if killed before the other policy published its second version
        await server.store.publish(asker.weights(2))
    async with lightning(config, halted) as server:
        assert await server.version() == 1
    await learn(config, halted)
    for policy in ("asker", "picker"):
        assert digest(halted / "model" / policy) == digest(recipe.folder / "straight" / "model" / policy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('policy = "picker"', 'policy = "piker"'), "no policy `piker`"),
        (lambda text: text.replace("[policies.picker]\n", '[policies.picker]\npreset = "dappo"\n'), "dappo"),
        (lambda text: text.replace("minibatches = 1", "minibatchez = 1"), "minibatchez"),
    ],
    ids=["route to nobody", "unknown preset", "unknown key"],
)
def test_what_is_wrong_with_a_policy_is_said(recipe: SmallRecipe, change: Callable[[str], str], said: str) -> None:
    recipe.path.write_text(change(recipe.path.read_text()))
    with pytest.raises(UserError) as raised:
        load_config(recipe.path)
    assert said in raised.value.message


async def test_groups_that_cannot_teach_are_replaced_by_other_tasks(recipe: SmallRecipe) -> None:
    """Tasks of which one always has the same reward."""
    reward = "    return len(answer) % 5 / 4"
    recipe.rewrite_agent(
        lambda text: text.replace(reward, f'    if task["question"] == "say a word":\n        return 0.5\n{reward}')
    )
    (recipe.folder / "run").mkdir()
    config = load_config(recipe.path, ["algorithm.dynamic_sampling=3"])
    async with lightning(config, recipe.folder / "run") as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        batch = await loop.collect(0)
        asked = {rollout.group_id for rollout in await server.store.rollouts()}
    kept = {rollout.group_id for rollout in batch}
    assert len(kept) == config.loop.tasks_per_step < len(asked)
    assert "train-00000-000" not in kept, "it asked to say a word"
    assert any("retry" in group_id for group_id in kept)


async def test_an_update_that_is_not_finite_is_not_made_and_its_batch_is_kept(recipe: SmallRecipe) -> None:
    (recipe.folder / "run").mkdir()
    async with lightning(load_config(recipe.path), recipe.folder / "run") as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        asker, picker = server.learners
        asker.trainer = cast(Trainer, Poisoned(asker.trainer))
        lessons, metrics = await loop.credit(0, await loop.collect(0))
        metrics |= await loop.learn(0, lessons)
        await loop.publish(1)
    assert metrics["asker/optim/skipped"] == 1.0 and metrics["picker/optim/skipped"] == 0.0
    run = recipe.folder / "run"
    assert digest(run / asker.weights(1).uri) == digest(recipe.folder / "model") != digest(run / picker.weights(1).uri)
    with np.load(run / "skipped" / "step-00000-asker.npz") as kept:
        assert len(kept["call_ids"]) == len(kept["starts"]) - 1 == 8
        assert kept["starts"][-1] == len(kept["completion_ids"]) == len(kept["advantages"])


class Poisoned:
    """Non-finite records are refused, so this test damages the numbers on their way to the trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def forward_backward(self, forest: Forest) -> Evaluation:
        return self._trainer.forward_backward(replace(forest, advantages=forest.advantages * np.nan))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


@pytest.mark.parametrize(
    "overrides",
    [
        ["preset=ppo"],
        ["preset=gspo", "loss.proximal=true", "loss.importance=call"],
        ["preset=cispo", "loss.kl_coef=0.01", "loss.entropy_coef=0.01"],
        ["algorithm.credit=tree_loo", "algorithm.advantage=rloo", "algorithm.group_by=role", "trainer.max_tokens=64"],
        ["algorithm.credit=discounted", "algorithm.credit_options.discount=0.9", "algorithm.advantage=opo"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
async def test_every_kind_of_algorithm_runs_from_the_recipe_alone(recipe: SmallRecipe, overrides: list[str]) -> None:
    (recipe.folder / "run").mkdir()
    async with lightning(load_config(recipe.path, ["loop.steps=1", *overrides]), recipe.folder / "run") as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        lessons, metrics = await loop.credit(0, await loop.collect(0))
        metrics |= await loop.learn(0, lessons)
    assert all(np.isfinite(value) for value in metrics.values())
    for policy in ("asker", "picker"):
        assert metrics[f"{policy}/optim/skipped"] == 0.0 and metrics[f"{policy}/optim/grad_norm"] > 0
        assert metrics[f"{policy}/policy/logprob_gap"] < 1e-4


RULE = """
def brief(span):
    return -len(span.output or "") / 10 if span.kind == "llm" else None
"""


@pytest.mark.parametrize("shaping", ["additive", "potential"])
async def test_intermediate_rewards_teach_where_the_final_one_says_nothing(recipe: SmallRecipe, shaping: str) -> None:
    """All final rewards are equal; a rule of the recipe distinguishes calls."""
    recipe.rewrite_agent(lambda text: text.replace("return len(answer) % 5 / 4", "return 1.0"))
    (recipe.folder / "brevity.py").write_text(RULE)
    (recipe.folder / "run").mkdir()
    overrides = [
        'air=[{rule="brevity:brief"}]',
        "preset=rloo",
        "algorithm.credit=air",
        "algorithm.group_by=role",
        f"algorithm.shaping={shaping}",
    ]
    async with lightning(load_config(recipe.path, overrides), recipe.folder / "run") as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        batch = await loop.collect(0)
        calls = await server.store.calls([rollout.accepted_attempt_id or "" for rollout in batch])
        lessons, metrics = await loop.credit(0, batch)
    earned = {call.id: -len(str(call.response["choices"][0]["message"]["content"])) / 10 for call in calls}
    assert len(set(earned.values())) > 2
    assert metrics["reward/mean"] == 1.0 and metrics["reward/air.brevity:brief"] == pytest.approx(
        sum(earned.values()) / len(batch)
    )
    for group in {rollout.group_id for rollout in batch}:
        second = [lesson for lesson in lessons["picker"] if lesson.group_id == group and lesson.weights.any()]
        first = {
            lesson.rollout_id: lesson.transition.call_id
            for lesson in lessons["picker"]
            if lesson.transition.agent == "asker"
        }
        # The last call gets its own reward, or the negative potential of the call before it.
        values = [
            earned[le.transition.call_id] if shaping == "additive" else -earned[first[le.rollout_id]] for le in second
        ]
        expected = np.array(values) - (np.sum(values) - values) / (len(values) - 1)
        np.testing.assert_allclose([lesson.advantages[0] for lesson in second], expected, atol=1e-6)
