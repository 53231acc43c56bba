"""Checks that every trainer must pass. `make()` returns a new trainer of the same small policy each time.

@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_trainer_keeps_its_promises(check, tmp_path): check(make, tmp_path)
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lightningrl.data.forest import Lesson, build_forest, unweighted
from lightningrl.data.packing import pack
from lightningrl.models.plain import plain_logprobs
from lightningrl.trainer.base import Trainer
from lightningrl.types import Doubles, Transition

Make: TypeAlias = Callable[[], Trainer]

RATE = 1e-2


def lesson(
    group_id: str,
    call_id: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    rng: np.random.Generator,
    temperature: float = 1.0,
) -> Lesson:
    """A call whose logprobs, advantages, weights and returns are noise: the gradient must be right for any values."""
    C = len(completion)
    return Lesson(
        rollout_id=call_id.rpartition("/")[0],
        group_id=group_id,
        transition=Transition(
            call_id=call_id,
            parent_call_id=None,
            agent="writer",
            policy_version=0,
            prompt_ids=np.array(prompt, np.int32),
            completion_ids=np.array(completion, np.int32),
            logprobs=rng.normal(-3.0, 1.0, C).astype(np.float32),
            reward=None,
            temperature=temperature,
        ),
        advantages=rng.normal(0.0, 1.0, C).astype(np.float32),
        weights=rng.uniform(0.01, 0.05, C),
        returns=float(rng.normal()),
        proximal=rng.normal(-3.0, 1.0, C),
    )


def lessons(
    seed: int, *, groups: int = 2, group_size: int = 3, turns: int = 3, vocab_size: int = 48, words: int = 3
) -> list[Lesson]:
    """Groups of rollouts over few distinct tokens, so that siblings share parts of their completions.

    Among them: rewritten histories, completions and prompts of one token, other temperatures, and one call twice.
    """
    rng = np.random.default_rng(seed)
    made: list[Lesson] = []
    for g in range(groups):
        task = rng.integers(0, vocab_size, rng.integers(1, 12)).tolist()
        for member in range(group_size):
            history = list(task)
            for turn in range(turns):
                completion = rng.integers(0, words, rng.integers(1, 6)).tolist()
                temperature = 1.0 if rng.random() < 0.8 else 0.7
                made.append(
                    lesson(f"g{g}", f"g{g}/{member}/{turn}", history, completion, rng=rng, temperature=temperature)
                )
                if rng.random() < 0.2:
                    history = rng.integers(0, vocab_size, rng.integers(1, 4)).tolist()  # rewritten: an unrelated root
                else:
                    history = history + completion + rng.integers(0, words, rng.integers(0, 3)).tolist()
    return [*made, dataclasses.replace(made[0], advantages=-2 * made[0].advantages)]


def check_splitting_changes_nothing(make: Make, folder: Path) -> None:
    """Several forests before one update give the update of one forest."""
    whole, parts = make(), make()
    found = [whole.forward_backward(build_forest(lessons(0)))]
    pieces = [parts.forward_backward(build_forest(piece)) for piece in pack(lessons(0), max_tokens=20, teaching=list)]
    assert len(pieces) > 3
    np.testing.assert_allclose(sum(p.metrics["loss/value"] for p in pieces), found[0].metrics["loss/value"], rtol=1e-5)
    for trainer in (whole, parts):
        trainer.optim_step(learning_rate=RATE)
    np.testing.assert_allclose(look(parts), look(whole), atol=2e-4)


def check_update_changes_the_policy(make: Make, folder: Path) -> None:
    trainer = make()
    before = look(trainer)
    assert step(trainer, 1)["optim/skipped"] == 0.0
    assert np.abs(look(trainer) - before).max() > 1e-3


def check_update_clears_the_gradient(make: Make, folder: Path) -> None:
    """At a learning rate of 0 the same forest has the same gradient again, not the double."""
    trainer = make()
    norms: list[float] = []
    for _ in range(2):
        trainer.forward_backward(build_forest(lessons(1)))
        norms.append(trainer.optim_step(learning_rate=0.0)["optim/grad_norm"])
    assert norms[0] == norms[1] > 0


def check_loss_that_is_not_finite_is_never_applied(make: Make, folder: Path) -> None:
    """One value of the forest that is not finite skips the whole update, even if the loss does not read it."""
    trainer, clean = make(), make()
    step(trainer, 1)
    step(clean, 1)
    forest = build_forest(lessons(2))
    for field in ("logprobs", "proximal", "advantages", "weights", "returns"):
        for wrong in (np.nan, np.inf, -np.inf):
            broken = getattr(forest, field).copy()
            broken[0] = wrong
            trainer.forward_backward(forest)
            trainer.forward_backward(dataclasses.replace(forest, **{field: broken}))
            assert trainer.optim_step(learning_rate=RATE)["optim/skipped"] == 1.0, (field, wrong)
    for each in (trainer, clean):
        assert step(each, 3)["optim/skipped"] == 0.0
    np.testing.assert_array_equal(look(trainer), look(clean))


def check_same_forests_give_same_bits(make: Make, folder: Path) -> None:
    one, two = make(), make()
    for seed in (1, 2):
        step(one, seed)
        step(two, seed)
    np.testing.assert_array_equal(look(one), look(two))


def check_load_goes_on_bit_for_bit(make: Make, folder: Path) -> None:
    straight, resumed = make(), make()
    for seed in (1, 2):
        step(straight, seed)
    straight.save(folder / "two")
    resumed.load(folder / "two")
    for trainer in (straight, resumed):
        step(trainer, 3)
    np.testing.assert_array_equal(look(resumed), look(straight))


def check_looking_at_logprobs_tells_those_of_training_and_changes_nothing(make: Make, folder: Path) -> None:
    trainer, other = make(), make()
    for each in lessons(0):
        call = each.transition
        if call.temperature == 1.0:
            found = trainer.logprobs(call.prompt_ids, call.completion_ids)
            np.testing.assert_allclose(found, other.forward_backward(build_forest([each])).logprobs, atol=1e-5)
    straight = make()
    for each in (trainer, straight):
        step(each, 1)
    np.testing.assert_array_equal(look(trainer), look(straight))


def check_evaluating_tells_what_training_sees_and_changes_nothing(make: Make, folder: Path) -> None:
    trainer, other = make(), make()
    forest = build_forest(lessons(0))
    found, expected = trainer.evaluate(forest), other.forward_backward(forest)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    named = {name for name in found.metrics if not name.startswith("policy/")}
    assert named - {"tokens/out_of_memory"} == {"tokens/computed", "tokens/terms"}
    assert found.metrics == {name: expected.metrics[name] for name in found.metrics}
    if found.values is not None and expected.values is not None:
        assert found.values.shape == (len(forest.call_ids),)
        np.testing.assert_allclose(found.values, expected.values, atol=1e-5)
    assert (found.entropies is None) == (expected.entropies is None)
    if found.entropies is not None and expected.entropies is not None:
        assert found.entropies.shape == (len(forest.targets),)
        assert 0 <= found.entropies.min() <= found.entropies.max()
        np.testing.assert_allclose(found.entropies, expected.entropies, atol=1e-5)
    straight = make()
    for each in (trainer, straight):
        step(each, 1)
    np.testing.assert_array_equal(look(trainer), look(straight))


def check_calls_without_weight_can_be_evaluated(make: Make, folder: Path) -> None:
    """The critic is evaluated before advantages are known."""
    given = lessons(0)
    silent = [unweighted(le.transition, rollout_id=le.rollout_id) for le in given]
    found, expected = make().evaluate(build_forest(silent, whole=True)), make().evaluate(build_forest(given))
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    if found.values is not None and expected.values is not None:
        np.testing.assert_allclose(found.values, expected.values, atol=1e-5)


def check_saving_again_replaces_and_leaves_nothing_else(make: Make, folder: Path) -> None:
    trainer, other = make(), make()
    trainer.save(folder / "run" / "state")
    step(trainer, 1)
    trainer.save(folder / "run" / "state")
    other.load(folder / "run" / "state")
    np.testing.assert_array_equal(look(other), look(trainer))
    assert [p.name for p in (folder / "run").iterdir()] == ["state"]


def check_publish_writes_a_hugging_face_folder(make: Make, folder: Path) -> None:
    """transformers reads the folder, and its log-probabilities are the trainer's."""
    trainer, call = make(), lessons(0)[0].transition
    first: list[float] = []
    for name, teach in (("first", False), ("second", True)):
        if teach:
            step(trainer, 1)
        trainer.publish(folder / name)
        assert {"config.json", "tokenizer.json"} <= {p.name for p in (folder / name).iterdir()}
        (said,) = plain_logprobs(folder / name, [(call.prompt_ids, call.completion_ids, 1.0)])
        learnt = trainer.logprobs(call.prompt_ids, call.completion_ids)
        np.testing.assert_allclose(said, learnt, atol=1e-4)  # invariant 2
        first.append(float(learnt[0]))
    assert abs(first[0] - first[1]) > 1e-3, "what is published has not changed with what is learnt"


def step(trainer: Trainer, seed: int) -> dict[str, float]:
    """One update from one forest."""
    trainer.forward_backward(build_forest(lessons(seed)))
    return trainer.optim_step(learning_rate=RATE)


def look(trainer: Trainer) -> Doubles:
    """Log-probabilities of some tokens under the current weights, and values of some calls if there is a critic."""
    found = trainer.evaluate(build_forest(lessons(99)))
    return found.logprobs if found.values is None else np.concatenate((found.logprobs, found.values))


CHECKS: tuple[Callable[[Make, Path], None], ...] = (
    check_splitting_changes_nothing,
    check_update_changes_the_policy,
    check_update_clears_the_gradient,
    check_loss_that_is_not_finite_is_never_applied,
    check_same_forests_give_same_bits,
    check_load_goes_on_bit_for_bit,
    check_looking_at_logprobs_tells_those_of_training_and_changes_nothing,
    check_evaluating_tells_what_training_sees_and_changes_nothing,
    check_calls_without_weight_can_be_evaluated,
    check_saving_again_replaces_and_leaves_nothing_else,
    check_publish_writes_a_hugging_face_folder,
)
