"""The KL term pulls towards the weights at the start of training, also after a restart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, build_forest
from lightningrl.errors import UserError
from lightningrl.models.base import Decoder
from lightningrl.models.load import load_model
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer

KL = LossConfig(kl_coef=1.0)


def make(model: Decoder, loss: LossConfig = KL) -> LocalTrainer:
    return LocalTrainer(model, config=TrainerConfig(threads=1), loss=loss, export=lambda model, path: None)


def silent() -> Forest:
    """A trainer whose objective is the KL term alone."""
    return build_forest([replace(le, advantages=0 * le.advantages) for le in conformance.lessons(5)])


def divergence(trainer: LocalTrainer) -> float:
    return trainer.forward_backward(silent()).metrics["loss/kl"]


def teach(trainer: LocalTrainer, steps: int) -> None:
    for seed in range(steps):
        conformance.step(trainer, seed)


def test_policy_begins_at_its_reference_leaves_it_and_is_pulled_back(model_folder: Path) -> None:
    trainer = make(load_model(str(model_folder)))
    assert divergence(trainer) == 0.0
    teach(trainer, 3)
    far = divergence(trainer)
    assert far > 1e-2
    for _ in range(20):
        trainer.forward_backward(silent())
        trainer.optim_step(learning_rate=3e-3)
    assert divergence(trainer) < far / 4


def test_resumed_run_keeps_its_reference_whatever_the_model_folder_holds(model_folder: Path, tmp_path: Path) -> None:
    trainer = make(load_model(str(model_folder)))
    teach(trainer, 2)
    trainer.save(tmp_path / "state")
    other = load_model(str(model_folder))
    with torch.no_grad():
        for p in other.hf.parameters():
            p.mul_(1.1)
    resumed = make(other)
    resumed.load(tmp_path / "state")
    assert divergence(resumed) == divergence(trainer) > 0


def test_reference_costs_nothing_without_a_kl_term(model_folder: Path, tmp_path: Path) -> None:
    trainer = make(load_model(str(model_folder)), LossConfig())
    assert "loss/kl" not in trainer.forward_backward(silent()).metrics
    trainer.save(tmp_path / "state")
    assert not (tmp_path / "state" / "reference.safetensors").exists()
    with pytest.raises(UserError, match="has no `reference"):
        make(load_model(str(model_folder))).load(tmp_path / "state")
