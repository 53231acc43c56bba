"""Masters are float32 where a model is bfloat16: small updates add up, checkpoints keep them, exports stay bfloat16."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer

Make = Callable[[], LocalTrainer]


@pytest.fixture(params=["full", "lora"])
def make(request: pytest.FixtureRequest, model_folder: Path) -> Make:
    export = partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))

    def made() -> LocalTrainer:
        model = load_model(str(model_folder), dtype="bfloat16")
        model = with_adapter(model, rank=4) if request.param == "lora" else model
        return LocalTrainer(model, config=TrainerConfig(threads=1), loss=LossConfig(), export=export)

    return made


def moved(trainer: LocalTrainer, names: str, *, rate: float, folder: Path, steps: int = 4) -> float:
    """The share of the named weights that a few updates change, read from checkpoints."""
    trainer.save(folder / "before")
    for seed in range(steps):
        trainer.forward_backward(build_forest(conformance.lessons(seed)))
        trainer.optim_step(learning_rate=rate)
    trainer.save(folder / "after")
    before, after = (load_file(folder / when / "weights.safetensors") for when in ("before", "after"))
    changed = torch.cat([(before[name] != after[name]).flatten() for name in before if names in name])
    return float(changed.float().mean())


@pytest.mark.parametrize(
    ("make", "names", "rate"), [("full", "_proj", 1e-6), ("lora", "lora_A", 2e-5)], indirect=["make"]
)
def test_nearly_every_weight_moves_at_a_usual_learning_rate(
    make: Make, names: str, rate: float, tmp_path: Path
) -> None:
    assert moved(make(), names, rate=rate, folder=tmp_path) > 0.99


def test_the_model_has_the_values_of_its_masters_rounded(make: Make) -> None:
    trainer = make()
    conformance.step(trainer, 0)
    learning = {name: p for name, p in trainer.model.hf.named_parameters() if p.requires_grad}
    assert learning.keys() == trainer._masters.tensors.keys()
    for name, master in trainer._masters.tensors.items():
        assert master.dtype == torch.float32
        assert torch.equal(learning[name], master.to(learning[name].dtype)), name


KEPT = (
    conformance.check_update_changes_the_policy,
    conformance.check_update_clears_the_gradient,
    conformance.check_loss_that_is_not_finite_is_never_applied,
    conformance.check_same_forests_give_same_bits,
    conformance.check_load_goes_on_bit_for_bit,
    conformance.check_saving_again_replaces_and_leaves_nothing_else,
)


@pytest.mark.parametrize("check", KEPT, ids=lambda check: check.__name__)
def test_checks_that_do_not_depend_on_rounding_pass(
    check: Callable[[conformance.Make, Path], None], make: Make, tmp_path: Path
) -> None:
    check(make, tmp_path)


def test_exported_weights_have_the_dtype_of_the_model(make: Make, tmp_path: Path) -> None:
    trainer = make()
    conformance.step(trainer, 0)
    trainer.publish(tmp_path / "out")
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}


def test_float32_weights_are_their_own_masters(model_folder: Path) -> None:
    trainer = LocalTrainer(
        load_model(str(model_folder)),
        config=TrainerConfig(threads=1),
        loss=LossConfig(),
        export=lambda model, path: None,
    )
    assert all(p is trainer._masters.tensors[name] for name, p in trainer.model.hf.named_parameters())


def out_of_memory(gradient: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_pass_that_fails_leaves_the_gradient_as_it_was(make: Make, earlier: int, tmp_path: Path) -> None:
    """It fails at the weight that is reached last, when most others have a gradient."""
    trainer, undisturbed = make(), make()
    for seed in range(earlier):
        for each in (trainer, undisturbed):
            each.forward_backward(build_forest(conformance.lessons(seed)))
    hook = next(iter(trainer.model.trainable().values())).register_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.forward_backward(build_forest(conformance.lessons(5)))
    hook.remove()
    for each in (trainer, undisturbed):
        each.forward_backward(build_forest(conformance.lessons(6)))
        each.optim_step(learning_rate=1e-2)
    for a, b in zip(trainer._masters.tensors.values(), undisturbed._masters.tensors.values(), strict=True):
        assert torch.equal(a, b)
