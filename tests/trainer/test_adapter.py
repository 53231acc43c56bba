"""Only the adapter of a model learns: in training, in checkpoints, and against its reference."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer


@pytest.fixture
def make(model_folder: Path) -> Callable[[], LocalTrainer]:
    export = partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    config, loss = TrainerConfig(threads=1), LossConfig(kl_coef=0.1)
    return lambda: LocalTrainer(
        with_adapter(load_model(str(model_folder)), rank=4), config=config, loss=loss, export=export, critic=True
    )


PROMISES = [
    check for check in conformance.CHECKS if check is not conformance.check_publish_writes_a_hugging_face_folder
]


@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_trainer_of_an_adapter_keeps_its_promises(
    check: Callable[[conformance.Make, Path], None], make: Callable[[], LocalTrainer], tmp_path: Path
) -> None:
    check(make, tmp_path)


def test_the_base_of_an_adapter_never_changes(make: Callable[[], LocalTrainer], model_folder: Path) -> None:
    trainer, base = make(), load_model(str(model_folder))
    conformance.step(trainer, 0)
    below = {
        name.replace(".base_layer", ""): p for name, p in trainer.model.hf.named_parameters() if not p.requires_grad
    }
    assert all(torch.equal(below[name], p) for name, p in base.hf.named_parameters())
    assert all(p.requires_grad == ("lora_" in name) for name, p in trainer.model.hf.named_parameters())


def test_checkpoint_holds_the_adapter_and_the_critic_alone(make: Callable[[], LocalTrainer], tmp_path: Path) -> None:
    trainer = make()
    conformance.step(trainer, 0)
    trainer.save(tmp_path / "state")
    names = load_file(tmp_path / "state" / "weights.safetensors").keys()
    assert {name for name in names if "lora_" not in name} == {"critic.weight", "critic.bias"}
    assert not (tmp_path / "state" / "reference.safetensors").exists()


def test_reference_is_the_model_below_its_adapter(make: Callable[[], LocalTrainer], model_folder: Path) -> None:
    trainer = make()
    forest = build_forest([replace(le, advantages=0 * le.advantages) for le in conformance.lessons(5)])
    assert trainer.forward_backward(forest).metrics["loss/kl"] == pytest.approx(0.0, abs=1e-9)
    conformance.step(trainer, 0)
    base = LocalTrainer(
        load_model(str(model_folder)),
        config=TrainerConfig(threads=1),
        loss=LossConfig(),
        export=lambda model, path: None,
    )
    delta = trainer.evaluate(forest).logprobs - base.evaluate(forest).logprobs
    assert trainer.forward_backward(forest).metrics["loss/kl"] == pytest.approx(
        float(np.mean(np.expm1(-delta) + delta)), rel=1e-3
    )
