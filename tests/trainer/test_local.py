"""The trainer in this process: the checks for all trainers, and its own behaviour."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.data.packing import pack
from lightningrl.errors import UserError
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer
from lightningrl.trainer.metrics import merged

EVERYTHING = LossConfig(
    ratio="rollout",
    clip_low=0.5,
    clip_high=0.5,
    clip_dual=3.0,
    proximal=True,
    importance="call",
    kl_coef=0.1,
    entropy_coef=0.01,
)


@pytest.fixture
def make(model_folder: Path) -> conformance.Make:
    export = partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    return lambda: LocalTrainer(
        load_model(str(model_folder)), config=TrainerConfig(threads=1), loss=LossConfig(), export=export
    )


@pytest.fixture
def make_with_everything(model_folder: Path) -> conformance.Make:
    """A trainer with every option of the loss, and a critic."""
    export = partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    return lambda: LocalTrainer(
        load_model(str(model_folder)), config=TrainerConfig(threads=1), loss=EVERYTHING, export=export, critic=True
    )


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_local_trainer_keeps_its_promises(
    check: Callable[[conformance.Make, Path], None], make: conformance.Make, tmp_path: Path
) -> None:
    check(make, tmp_path)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_local_trainer_keeps_its_promises_with_every_option(
    check: Callable[[conformance.Make, Path], None], make_with_everything: conformance.Make, tmp_path: Path
) -> None:
    check(make_with_everything, tmp_path)


def test_two_threads_give_the_same_bits_twice(model_folder: Path) -> None:
    config = TrainerConfig(threads=2)
    found = []
    for _ in range(2):
        trainer = LocalTrainer(
            load_model(str(model_folder)), config=config, loss=LossConfig(), export=lambda model, path: None
        )
        for seed in range(3):
            conformance.step(trainer, seed)
        found.append([p.detach().clone() for p in trainer.model.hf.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_weights_are_changed_in_place(make: Callable[[], LocalTrainer], tmp_path: Path) -> None:
    trainer = make()
    places = [p.data_ptr() for p in trainer.model.hf.parameters()]
    conformance.step(trainer, 0)
    trainer.save(tmp_path / "state")
    trainer.load(tmp_path / "state")
    conformance.step(trainer, 1)
    assert [p.data_ptr() for p in trainer.model.hf.parameters()] == places


def test_number_of_threads_is_left_as_it_was(make: Callable[[], LocalTrainer]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        conformance.step(make(), 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_gradient_that_is_not_finite_is_never_applied(make: Callable[[], LocalTrainer]) -> None:
    """A finite loss may have a gradient that is not finite."""
    trainer, clean = make(), make()
    trainer.forward_backward(build_forest(conformance.lessons(0)))
    next(trainer.model.hf.parameters()).grad[0, 0] = float("inf")
    assert trainer.optim_step(learning_rate=1e-2)["optim/skipped"] == 1.0
    np.testing.assert_array_equal(conformance.look(trainer), conformance.look(clean))


def test_long_gradient_is_scaled_to_the_limit(make: Callable[[], LocalTrainer]) -> None:
    trainer = make()
    forest = build_forest(conformance.lessons(0))
    trainer.forward_backward(forest)
    gradients = [p.grad.clone() for p in trainer.model.hf.parameters()]
    norm = sum(float((g.double() ** 2).sum()) for g in gradients) ** 0.5
    found = trainer.optim_step(learning_rate=0.0)
    assert found["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 1.0
    moments = [s["exp_avg"] for s in trainer._optimizer.state.values()]
    length = sum(float((m.double() ** 2).sum()) for m in moments) ** 0.5 / (1 - 0.9)
    assert length == pytest.approx(1.0, rel=1e-3)


def test_exported_folder_has_the_trained_weights(make: Callable[[], LocalTrainer], tmp_path: Path) -> None:
    trainer = make()
    conformance.step(trainer, 0)
    trainer.publish(tmp_path / "out")
    again = load_model(str(tmp_path / "out"))
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.hf.parameters(), again.hf.parameters(), strict=True))


def test_load_from_nowhere_and_from_another_model_are_refused(make: Callable[[], LocalTrainer], tmp_path: Path) -> None:
    trainer = make()
    with pytest.raises(UserError, match="no checkpoint"):
        trainer.load(tmp_path / "missing")
    trainer.save(tmp_path / "state")
    weights = tmp_path / "state" / "weights.safetensors"
    save_file({"other": torch.zeros(2)}, weights)
    before = conformance.look(trainer)
    with pytest.raises(UserError, match="another model"):
        trainer.load(tmp_path / "state")
    np.testing.assert_array_equal(conformance.look(trainer), before)


def test_recorded_logprobs_before_the_first_update_measure_parity(make: Callable[[], LocalTrainer]) -> None:
    trainer = make()
    forest = build_forest(conformance.lessons(0))
    logprobs = trainer.forward_backward(forest).logprobs
    given = []
    for lesson in conformance.lessons(0):
        recorded = trainer.forward_backward(build_forest([lesson])).logprobs.astype(np.float32)
        given.append(replace(lesson, transition=replace(lesson.transition, logprobs=recorded)))
    metrics = trainer.forward_backward(build_forest(given)).metrics
    assert metrics["policy/logprob_gap_max"] < 1e-4
    assert abs(metrics["policy/kl_engine"]) < 1e-8
    gap = np.abs(logprobs - forest.logprobs).max()
    assert trainer.forward_backward(forest).metrics["policy/logprob_gap_max"] == pytest.approx(gap, rel=1e-5)


def test_supervised_learning_is_pg_with_advantages_of_one(model_folder: Path) -> None:
    """The loss is the mean negative log-likelihood, and it falls."""
    trainer = LocalTrainer(
        load_model(str(model_folder)),
        config=TrainerConfig(threads=1),
        loss=LossConfig(name="pg"),
        export=lambda model, path: None,
    )
    given = conformance.lessons(0)
    count = sum(len(le.weights) for le in given)
    forest = build_forest(
        [
            replace(le, advantages=np.ones_like(le.advantages), weights=np.full_like(le.weights, 1 / count))
            for le in given
        ]
    )
    values = []
    for _ in range(15):
        found = trainer.forward_backward(forest)
        assert found.metrics["loss/value"] == pytest.approx(-found.logprobs.mean(), rel=1e-5)
        values.append(found.metrics["loss/value"])
        trainer.optim_step(learning_rate=1e-2)
    assert values[-1] < 0.6 * values[0]


def test_metrics_of_micro_batches_merge_to_those_of_the_whole(make_with_everything: Callable[[], LocalTrainer]) -> None:
    trainer = make_with_everything()
    conformance.step(trainer, 0)  # away from the reference and from a critic of zero
    whole = trainer.forward_backward(build_forest(conformance.lessons(0))).metrics
    packs = pack(conformance.lessons(0), max_tokens=20)
    assert len(packs) > 3
    parts = merged([trainer.forward_backward(build_forest(p)).metrics for p in packs])
    assert parts.keys() == whole.keys()
    for name in whole.keys() - {"tokens/computed"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6), name
