"""What a step taught is recorded as it was, and recording it changes nothing."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightningrl.conformance import SilentWatcher
from lightningrl.data.forest import Lesson
from lightningrl.data.packing import teaches
from lightningrl.data.taught import Taught
from lightningrl.look.taught import taught_of
from lightningrl.models.plain import plain_logprobs
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.types import Doubles
from tests.conftest import SmallRecipe

TWO = """
[policies.asker]
[policies.picker]
[[routes]]
model = "asker"
policy = "asker"
[[routes]]
model = "picker"
policy = "picker"
"""


async def step(
    recipe: SmallRecipe, *overrides: str, steps: int = 1, run: str = "run", publish: bool = True
) -> dict[str, list[Lesson]]:
    """Train until `steps` steps are taken. Returns the lessons of the last one."""
    folder = recipe.folder / run
    folder.mkdir(exist_ok=True)
    config = load_config(recipe.path, ["tasks.heldout=1", "loop.group_size=6", *overrides])
    async with lightning(config, folder) as server:
        loop = server.loop(SilentWatcher())
        lessons = dict[str, list[Lesson]]()
        for number in range(await loop.restore(), steps):
            lessons, _ = await loop.credit(number, await loop.collect(number))
            await loop.learn(number, lessons)
            if publish:
                await loop.publish(number + 1)
    return lessons


def recorded(recipe: SmallRecipe, policy: str = "policy", *, run: str = "run") -> Taught:
    found = taught_of(recipe.folder / run, 0, policy)
    assert found is not None
    return found


def calls_of(lessons: Mapping[str, list[Lesson]]) -> dict[str, Lesson]:
    return {lesson.transition.call_id: lesson for own in lessons.values() for lesson in own}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@torch.no_grad()
def plain_entropies(folder: Path, lesson: Lesson) -> Doubles:
    """[C] by Hugging Face's own code, in float32."""
    call = lesson.transition
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.concatenate((call.prompt_ids, call.completion_ids)).astype(np.int64))
    logprobs = (model(ids[None]).logits[0, len(call.prompt_ids) - 1 : -1] / call.temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1).double().numpy()


async def test_entropies_before_and_logprobs_after_are_those_of_a_plain_forward_pass(small_recipe: SmallRecipe) -> None:
    calls = calls_of(await step(small_recipe, "trainer.measured=0.5"))
    found, checkpoints = recorded(small_recipe), small_recipe.folder / "run" / "checkpoints"
    assert found.entropies.keys() == found.logprobs_after.keys() and found.values == {}
    for call_id, after in found.logprobs_after.items():
        call = calls[call_id].transition
        asked = [(call.prompt_ids, call.completion_ids, call.temperature)]
        (expected,) = plain_logprobs(checkpoints / "step-00001", asked)
        np.testing.assert_allclose(after, expected, atol=1e-5)
        assert np.abs(after - call.logprobs).max() > 1e-4, "the update has moved it"
        before = plain_entropies(checkpoints / "step-00000", calls[call_id])
        np.testing.assert_allclose(found.entropies[call_id], before, atol=1e-5)


async def test_the_calls_that_teach_of_whole_groups_are_measured(small_recipe: SmallRecipe) -> None:
    """At most the given share, and at least a group."""
    for share, groups, run in ((0.01, 1, "one"), (1.0, 2, "all")):
        overrides = [f"trainer.measured={share}", "trainer.minibatches=1"]
        calls = calls_of(await step(small_recipe, *overrides, run=run))
        found = recorded(small_recipe, run=run)
        measured = {calls[name].group_id for name in found.logprobs_after}
        assert len(measured) == groups
        teaching = {name for name, le in calls.items() if le.group_id in measured and teaches(le)}
        assert set(found.logprobs_after) == teaching


async def test_measuring_changes_no_bit_of_the_weights(small_recipe: SmallRecipe) -> None:
    for share in (0, 1):
        await step(small_recipe, f"trainer.measured={share}", steps=2, run=str(share))
    ends = [small_recipe.folder / run / "checkpoints" / "step-00002" for run in ("0", "1")]
    assert digest(ends[0] / "model.safetensors") == digest(ends[1] / "model.safetensors")
    for name in ("weights", "moments"):
        one, other = (digest(end / "trainer" / f"{name}.safetensors") for end in ends)
        assert one == other
    assert taught_of(small_recipe.folder / "0", 0, "policy") is None
    assert taught_of(small_recipe.folder / "1", 1, "policy") is not None


async def test_a_step_goes_on_if_what_it_taught_cannot_be_saved(
    small_recipe: SmallRecipe, caplog: pytest.LogCaptureFixture
) -> None:
    (small_recipe.folder / "run").mkdir()
    (small_recipe.folder / "run" / "taught").write_text("in the way")
    await step(small_recipe, "trainer.measured=1")
    assert (small_recipe.folder / "run" / "checkpoints" / "step-00001").is_dir()
    assert "step 1: what it taught was not saved" in caplog.text


async def test_values_of_the_critic_are_recorded_as_they_were_used(small_recipe: SmallRecipe) -> None:
    """The second step: the critic begins at zero."""
    lessons = await step(small_recipe, "preset=ppo", steps=2)
    found = taught_of(small_recipe.folder / "run", 1, "policy")
    assert found is not None
    assert found.values == {name: lesson.transition.value for name, lesson in calls_of(lessons).items()}
    assert len(set(found.values.values())) > 2


async def test_each_policy_has_a_file_of_its_own_calls(small_recipe: SmallRecipe) -> None:
    small_recipe.rewrite_agent(lambda text: text.replace('model="policy"', 'model="asker" if follow_up else "picker"'))
    small_recipe.path.write_text(small_recipe.path.read_text() + TWO)
    overrides = ["policies.picker.preset=ppo", "policies.asker.trainer.measured=0.0"]
    lessons = await step(small_recipe, *overrides)
    assert taught_of(small_recipe.folder / "run", 0, "asker") is None
    found = recorded(small_recipe, "picker")
    assert found.values.keys() == {le.transition.call_id for le in lessons["picker"] if le.weights.any()}
    assert 0 < len(found.logprobs_after) < len(found.values)


async def test_a_step_that_is_repeated_after_a_kill_writes_the_same_bytes(small_recipe: SmallRecipe) -> None:
    """Killed after the file was written, and before the weights were saved."""
    file, found = small_recipe.folder / "run" / "taught" / "step-00000-policy.npz", list[bytes]()
    for publish in (False, True):
        await step(small_recipe, "preset=ppo", publish=publish)
        found.append(file.read_bytes())
        file.unlink()
    assert found[0] == found[1]
