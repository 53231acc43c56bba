"""The checks of invariants 1 to 3 pass on a real batch with failed attempts, and fail for each kind of damage."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightningrl.conformance import Batch, Trained, check, collected
from lightningrl.data.forest import Forest
from lightningrl.types import Branch, Call
from tests.conftest import AGENT, RECIPE

BREAKS = """
        if len(broken) < 3:
            broken.append(task)
            raise RuntimeError("the first three attempts break after their first call")
"""
OVERRIDES = ["agent.max_attempts=2", "agent.concurrency=1", "loop.group_size=2"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A batch whose first three attempts fail midway: one rollout fails, and the next one needs two attempts."""
    folder = tmp_path_factory.mktemp("recipe")
    ask, go_on = "client = None\n", '        messages += [{"role": "assistant"'
    (folder / "agent.py").write_text(
        AGENT.replace(ask, f"{ask}broken = []\n", 1).replace(go_on, f"{BREAKS.lstrip(chr(10))}{go_on}")
    )
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "model").symlink_to(model_folder)
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def batch(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    return asyncio.run(collected(recipe, tmp_path_factory.mktemp("run"), overrides=OVERRIDES))


def test_a_real_batch_with_failed_attempts_passes(batch: Batch) -> None:
    check(batch)
    assert [rollout.status for rollout in batch.rollouts].count("failed") == 1
    assert len(batch.calls) == len(batch.heard) == len(batch.accepted) + 3 == 9
    assert {call.capture for call in batch.accepted} == {"rendered", "bridged"}
    assert len(batch.plain) == len(batch.accepted)


def with_branch(batch: Batch) -> Batch:
    """A branch that has played back the first call of an accepted attempt."""
    call = batch.accepted[0]
    trunk = next(rollout for rollout in batch.rollouts if rollout.accepted_attempt_id == call.attempt_id)
    branch = Branch(attempt_id=call.attempt_id, call_id=None)
    rollout = dataclasses.replace(trunk, id="b", accepted_attempt_id="b.1", branch=branch)
    played = dataclasses.replace(call, id="b.1/0", attempt_id="b.1", replays=call.id)
    return dataclasses.replace(batch, calls=(*batch.calls, played), rollouts=(*batch.rollouts, rollout))


def test_a_played_back_call_was_neither_generated_nor_trained_again(batch: Batch) -> None:
    check(with_branch(batch))


def test_an_agent_may_hang_up_before_a_played_back_answer_has_ended(batch: Batch) -> None:
    branched = with_branch(batch)
    call = branched.calls[-1]
    cut = {"completion_ids": call.completion_ids[:1], "logprobs": call.logprobs[:1], "capture": "incomplete"}
    check(dataclasses.replace(branched, calls=(*batch.calls, dataclasses.replace(call, **cut))))


def recording_is_changed(batch: Batch) -> Batch:
    branched = with_branch(batch)
    changed = dataclasses.replace(branched.calls[-1], logprobs=plus(branched.calls[-1].logprobs, 1e-3))
    return dataclasses.replace(branched, calls=(*batch.calls, changed))


def recording_is_of_another_call(batch: Batch) -> Batch:
    branched = with_branch(batch)
    return dataclasses.replace(branched, calls=(*batch.calls, dataclasses.replace(branched.calls[-1], replays="no/0")))


def playback_is_generated(batch: Batch) -> Batch:
    branched = with_branch(batch)
    call = branched.calls[-1]
    twice = [heard for heard in batch.heard if heard.prompt_ids == tuple(call.prompt_ids.tolist())]
    return dataclasses.replace(branched, heard=(*batch.heard, twice[0]))


def playback_is_counted_as_sampled(batch: Batch) -> Batch:
    return dataclasses.replace(with_branch(batch), left_out={"policy": {"replayed": len(batch.accepted[0].logprobs)}})


def with_calls(batch: Batch, change: Callable[[Call], Call], *, bridged: bool = True) -> Batch:
    """Change the first call that is (or is not) bridged."""
    place = next(i for i, call in enumerate(batch.calls) if (call.capture == "bridged") == bridged)
    return dataclasses.replace(
        batch, calls=(*batch.calls[:place], change(batch.calls[place]), *batch.calls[place + 1 :])
    )


def with_forest(batch: Batch, change: Callable[[Forest], dict[str, object]]) -> Batch:
    first, *others = batch.trained
    return dataclasses.replace(
        batch,
        trained=(dataclasses.replace(first, forest=dataclasses.replace(first.forest, **change(first.forest))), *others),
    )


def plus(array: np.ndarray, number: float) -> np.ndarray:
    """The array with another number in the middle."""
    changed = array.copy()
    changed[len(array) // 2] += number
    return changed


def call_is_lost(batch: Batch) -> Batch:
    """A forest with the calls of a failed attempt."""
    accepted = {call.id for call in batch.accepted}
    lost = next(call for call in batch.calls if call.id not in accepted)
    return dataclasses.replace(batch, calls=tuple(call for call in batch.calls if call is not lost))


def prompt_is_recomputed(batch: Batch) -> Batch:
    return with_calls(batch, lambda call: dataclasses.replace(call, prompt_ids=plus(call.prompt_ids, 1)))


def token_is_dropped(batch: Batch) -> Batch:
    return with_calls(
        batch,
        lambda call: dataclasses.replace(call, completion_ids=call.completion_ids[:-1], logprobs=call.logprobs[:-1]),
    )


def logprob_is_rounded(batch: Batch) -> Batch:
    return with_calls(
        batch, lambda call: dataclasses.replace(call, logprobs=call.logprobs.astype(np.float16).astype(np.float32))
    )


def generation_is_made_up(batch: Batch) -> Batch:
    return dataclasses.replace(batch, heard=batch.heard[1:])


def generation_is_recorded_twice(batch: Batch) -> Batch:
    return dataclasses.replace(batch, calls=(*batch.calls, dataclasses.replace(batch.calls[0], id="again")))


def version_is_another(batch: Batch) -> Batch:
    return with_calls(batch, lambda call: dataclasses.replace(call, policy_version=1))


def history_is_rendered_again(batch: Batch) -> Batch:
    """The engine read this prompt, but it does not begin with the earlier answer."""
    calls = {call.id: call for call in batch.calls}
    child = next(call for call in batch.calls if call.capture == "bridged")
    parent = calls[child.parent_call_id or ""]
    place = len(parent.prompt_ids)  # the first token that was sampled
    assert place < len(child.prompt_ids)
    told = child.prompt_ids.copy()
    told[place] += 1
    heard = [
        dataclasses.replace(heard, prompt_ids=tuple(told.tolist()))
        if heard.prompt_ids == tuple(child.prompt_ids.tolist())
        else heard
        for heard in batch.heard
    ]
    changed = [dataclasses.replace(call, prompt_ids=told) if call is child else call for call in batch.calls]
    return dataclasses.replace(batch, calls=tuple(changed), heard=tuple(heard))


def forest_spells_something_else(batch: Batch) -> Batch:
    return with_forest(batch, lambda forest: {"token_ids": plus(forest.token_ids, 1)})


def forest_shifts_positions(batch: Batch) -> Batch:
    return with_forest(batch, lambda forest: {"positions": forest.positions + 1})


def token_is_predicted_from_elsewhere(batch: Batch) -> Batch:
    return with_forest(batch, lambda forest: {"sources": np.append(forest.sources[1], forest.sources[1:])})


def target_is_another(batch: Batch) -> Batch:
    return with_forest(batch, lambda forest: {"targets": plus(forest.targets, 1)})


def forest_comes_twice(batch: Batch) -> Batch:
    return dataclasses.replace(batch, trained=(*batch.trained, batch.trained[0]))


def forest_is_lost(batch: Batch) -> Batch:
    return dataclasses.replace(batch, trained=batch.trained[1:])


def report_counts_too_many(batch: Batch) -> Batch:
    return dataclasses.replace(batch, left_out={"policy": {"sampling": 1}})


def failure_is_learnt_from(batch: Batch) -> Batch:
    succeeded = next(rollout for rollout in batch.rollouts if rollout.accepted_attempt_id)
    failed = dataclasses.replace(succeeded, status="failed", accepted_attempt_id=None)
    return dataclasses.replace(
        batch, rollouts=tuple(failed if rollout is succeeded else rollout for rollout in batch.rollouts)
    )


def trainer_differs(batch: Batch) -> Batch:
    first: Trained = batch.trained[0]
    return dataclasses.replace(
        batch, trained=(dataclasses.replace(first, logprobs=plus(first.logprobs, 2e-4)), *batch.trained[1:])
    )


def hugging_face_differs(batch: Batch) -> Batch:
    return dataclasses.replace(
        batch, plain={call_id: plus(logprobs, 2e-4) for call_id, logprobs in batch.plain.items()}
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (call_is_lost, "1 generations of the engine are not in the store"),
        (prompt_is_recomputed, "differ from what the engine read and sampled"),
        (token_is_dropped, "differ from what the engine read and sampled"),
        (logprob_is_rounded, "differ from what the engine read and sampled"),
        (generation_is_made_up, "differ from what the engine read and sampled"),
        (generation_is_recorded_twice, "differ from what the engine read and sampled"),
        (recording_is_changed, "is not what `.*` has recorded"),
        (recording_is_of_another_call, "`b.1/0` is not what `no/0` has recorded"),
        (playback_is_generated, "1 generations of the engine are not in the store"),
        (playback_is_counted_as_sampled, "'replayed': "),
        (version_is_another, "differ from what the engine read and sampled"),
        (history_is_rendered_again, "does not begin with the ids of"),
        (forest_spells_something_else, "reads other ids"),
        (forest_shifts_positions, "have other positions"),
        (token_is_predicted_from_elsewhere, "from another prefix"),
        (target_is_another, "not each a target once"),
        (forest_comes_twice, "not each a target once"),
        (forest_is_lost, "accounts for `0`"),
        (report_counts_too_many, "'sampling': 1"),
        (failure_is_learnt_from, "belong to no accepted attempt"),
        (trainer_differs, "the trainer and the engine differ by `0.0002`"),
        (hugging_face_differs, "Hugging Face's code and the engine differ by `0.0002`"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_damage_is_seen(batch: Batch, damage: Callable[[Batch], Batch], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check(damage(batch))


async def test_after_a_training_step_the_published_weights_are_checked(recipe: Path, tmp_path: Path) -> None:
    learnt = await collected(recipe, tmp_path, overrides=[*OVERRIDES, "trainer.learning_rate=1e-2"], steps=1)
    check(learnt)
    assert {heard.version for heard in learnt.heard} == {1}
