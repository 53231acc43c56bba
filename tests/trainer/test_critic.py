"""The value head: what it learns, how it affects the trunk, and where it is saved."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.errors import UserError
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer


def make(model_folder: Path, *, critic: bool = True, value_coef: float = 0.5) -> LocalTrainer:
    export = partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    loss = LossConfig(name="pg", value_coef=value_coef)
    return LocalTrainer(
        load_model(str(model_folder)), config=TrainerConfig(threads=1), loss=loss, export=export, critic=critic
    )


def silent(made: list[Lesson]) -> list[Lesson]:
    return [replace(le, advantages=0 * le.advantages) for le in made]


def trunk(trainer: LocalTrainer) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1).clone() for p in trainer.model.hf.parameters()])


def test_critic_begins_at_zero(model_folder: Path) -> None:
    found = make(model_folder).evaluate(build_forest(conformance.lessons(0)))
    assert found.values is not None and not found.values.any()
    assert make(model_folder, critic=False).evaluate(build_forest(conformance.lessons(0))).values is None


def test_critic_learns_the_returns_of_calls(model_folder: Path) -> None:
    """A return that depends on the last token of the prompt."""
    trainer = make(model_folder)
    forest = build_forest(
        silent([replace(le, returns=float(le.transition.prompt_ids[-1] % 3) - 5) for le in conformance.lessons(0)])
    )
    for _ in range(60):
        trainer.forward_backward(forest)
        trainer.optim_step(learning_rate=1e-2)
    found = trainer.forward_backward(forest)
    assert found.metrics["critic/explained_variance"] > 0.9
    assert found.values is not None and forest.returns is not None
    assert np.abs(found.values - forest.returns).mean() < 0.5


def test_prompts_that_are_the_same_have_the_same_value_whatever_was_sampled(model_folder: Path) -> None:
    trainer = make(model_folder)
    conformance.step(trainer, 0)
    rng = np.random.default_rng(0)
    calls = [
        conformance.lesson("g", f"r/{i}", [5, 6, 7], completion, rng=rng)
        for i, completion in enumerate([[1], [2, 3], [1, 4, 4]])
    ]
    values = trainer.evaluate(build_forest(calls)).values
    assert values is not None and values[0] != 0
    assert len(set(values.tolist())) == 1


def test_gradient_into_the_trunk_is_scaled_by_value_coef(model_folder: Path) -> None:
    forest = build_forest(silent(conformance.lessons(0)))
    found = []
    for value_coef in (0.5, 1.0, 0.0):
        trainer = make(model_folder, value_coef=value_coef)
        assert trainer.critic is not None
        torch.nn.init.constant_(trainer.critic.weight, 0.1)
        trainer.forward_backward(forest)
        found.append(trunk(trainer))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], 2 * found[0])
    assert not found[2].any()


def test_large_error_of_the_critic_does_not_shorten_the_step_of_the_policy(model_folder: Path) -> None:
    """A zero head adds no gradient to the trunk, and its own gradient is clipped separately."""
    calls = [replace(le, returns=1e6) for le in conformance.lessons(0)]
    weights = []
    for critic in (True, False):
        trainer = make(model_folder, critic=critic)
        trainer.forward_backward(build_forest(calls))
        trainer.optim_step(learning_rate=1e-2)
        weights.append(torch.cat([p.detach().reshape(-1) for p in trainer.model.hf.parameters()]))
    assert torch.equal(*weights)


def test_lessons_without_returns_leave_the_critic_alone(model_folder: Path) -> None:
    trainer = make(model_folder)
    metrics = trainer.forward_backward(
        build_forest([replace(le, returns=None) for le in conformance.lessons(0)])
    ).metrics
    assert not any(name.startswith("critic/") for name in metrics)
    trainer.optim_step(learning_rate=1e-2)
    assert not look(trainer).any()


def look(trainer: LocalTrainer) -> np.ndarray:
    values = trainer.evaluate(build_forest(conformance.lessons(9))).values
    assert values is not None
    return values


def test_critic_is_saved_and_loaded_bit_for_bit_and_never_published(model_folder: Path, tmp_path: Path) -> None:
    trainer, other = make(model_folder), make(model_folder)
    conformance.step(trainer, 0)
    trainer.save(tmp_path / "state")
    other.load(tmp_path / "state")
    np.testing.assert_array_equal(look(other), look(trainer))
    assert look(trainer).any()
    trainer.publish(tmp_path / "model")
    assert (
        load_file(tmp_path / "model" / "model.safetensors").keys()
        == load_file(model_folder / "model.safetensors").keys()
    )


def test_checkpoint_without_a_critic_is_refused_by_a_trainer_with_one(model_folder: Path, tmp_path: Path) -> None:
    make(model_folder, critic=False).save(tmp_path / "state")
    with pytest.raises(UserError, match="another model"):
        make(model_folder).load(tmp_path / "state")
