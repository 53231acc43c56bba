"""What learns is float32 with AdamW in float32, whatever the dtype of the model: at usual learning rates nearly every
weight moves in every update, checkpoints keep what moved, and exports have the model's dtype.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models.base import Decoder
from lightningrl.models.load import DTypeName, export_folder, load_into, load_model, load_tokenizer
from lightningrl.models.lora import load_adapter, with_adapter
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer

Make = Callable[[], LocalTrainer]
EVERYTHING = LossConfig(
    ratio="rollout", clip_dual=3.0, proximal=True, importance="call", kl_coef=0.1, entropy_coef=0.01
)
NARROW: tuple[DTypeName, ...] = ("bfloat16", "float16")
RATES = {"full": 1e-6, "lora": 2e-5}
"""Usual learning rates of large models, and those of most `gpu.toml` recipes."""


def trainer_of(model: Decoder, folder: Path) -> LocalTrainer:
    export = partial(export_folder, tokenizer=load_tokenizer(str(folder)))
    return LocalTrainer(model, config=TrainerConfig(threads=1, device="cpu"), loss=LossConfig(), export=export)


@pytest.fixture(params=NARROW)
def dtype(request: pytest.FixtureRequest) -> DTypeName:
    return request.param


@pytest.fixture(params=RATES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str, dtype: DTypeName, model_folder: Path) -> Make:
    def made() -> LocalTrainer:
        model = load_model(str(model_folder), dtype=dtype)
        return trainer_of(with_adapter(model, rank=4) if kind == "lora" else model, model_folder)

    return made


def update(trainer: LocalTrainer, seed: int, *, rate: float) -> None:
    trainer.forward_backward(build_forest(conformance.lessons(seed)))
    assert trainer.optim_step(learning_rate=rate)["optim/skipped"] == 0.0


def masters(trainer: LocalTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer._policy.items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor], names: str = "") -> float:
    """The share of the entries that differ, of the tensors with `names` in their name."""
    changed = torch.cat([(before[name] != after[name]).flatten() for name in before if names in name])
    return float(changed.double().mean())


def rounded(tensors: dict[str, Tensor], dtype: DTypeName) -> dict[str, Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["lora"], indirect=True)
def test_nearly_every_entry_of_an_adapter_moves_in_an_update_at_2e_5(make: Make, dtype: DTypeName) -> None:
    """B begins at zero, so A has no gradient in the first update: it moves from the second on."""
    trainer = make()
    start = masters(trainer)
    update(trainer, 0, rate=RATES["lora"])
    first = masters(trainer)
    assert moved(start, first, "lora_B") > 0.99 and moved(start, first, "lora_A") == 0.0
    update(trainer, 1, rate=RATES["lora"])
    second = masters(trainer)
    assert moved(first, second, "lora_B") > 0.99 and moved(first, second, "lora_A") > 0.99
    in_the_dtype_of_the_base = moved(rounded(first, dtype), rounded(second, dtype), "lora_A")
    assert in_the_dtype_of_the_base < 0.5, "without float32 adapters, most of this update would be lost"


@pytest.mark.parametrize("kind", ["full"], indirect=True)
def test_nearly_every_master_of_full_weights_moves_in_an_update_at_1e_6(make: Make, dtype: DTypeName) -> None:
    trainer = make()
    start = masters(trainer)
    update(trainer, 0, rate=RATES["full"])
    first = masters(trainer)
    assert moved(start, first) > 0.99 and moved(start, first, "_proj") > 0.99
    assert moved(rounded(start, dtype), rounded(first, dtype), "_proj") < 0.2, "in the model itself few weights move"


def test_small_updates_add_up_in_the_model(make: Make, kind: str, dtype: DTypeName) -> None:
    """A single update hardly moves the rounded weights, but all together do: what rounding cuts off is not lost."""
    trainer = make()
    served = rounded(masters(trainer), dtype)
    for _ in range(40):
        update(trainer, 0, rate=RATES[kind])
    names = "_proj" if kind == "full" else "lora_A"
    assert moved(served, rounded(masters(trainer), dtype), names) > {"full": 0.05, "lora": 0.9}[kind]


def test_a_run_that_resumes_at_a_usual_rate_has_the_same_masters_bit_for_bit(
    make: Make, kind: str, tmp_path: Path
) -> None:
    straight, resumed = make(), make()
    for seed in range(2):
        update(straight, seed, rate=RATES[kind])
    straight.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    assert moved(masters(straight), masters(resumed)) == 0.0
    for trainer in (straight, resumed):
        update(trainer, 2, rate=RATES[kind])
    assert moved(masters(straight), masters(resumed)) == 0.0
    np.testing.assert_array_equal(conformance.look(straight), conformance.look(resumed))


@pytest.mark.parametrize("kind", ["lora"], indirect=True)
def test_an_adapter_is_float32_on_every_way_into_a_trainer(
    make: Make, dtype: DTypeName, model_folder: Path, tmp_path: Path
) -> None:
    """Published adapters have the dtype of the base. Loaded again they are float32, and all of their entries move."""
    trainer = make()
    update(trainer, 0, rate=RATES["lora"])
    trainer.publish(tmp_path / "adapter")
    base = load_model(str(model_folder), dtype=dtype)
    ways = {
        "a folder": load_model(str(tmp_path / "adapter"), dtype=dtype),
        "load_adapter": load_adapter(base, tmp_path / "adapter"),
        "load_into a base": load_into(base, str(tmp_path / "adapter")),
        "load_into an adapter": load_into(with_adapter(base, rank=4), str(tmp_path / "adapter")),
    }
    for way, model in ways.items():
        again = trainer_of(model, model_folder)
        held = masters(again)
        assert {p.dtype for p in held.values()} == {torch.float32}, way
        assert moved(rounded(masters(trainer), dtype), rounded(held, dtype)) == 0.0, way
        update(again, 1, rate=RATES["lora"])
        assert moved(held, masters(again), "lora_A") > 0.99 and moved(held, masters(again), "lora_B") > 0.99, way


def test_what_is_published_computes_what_the_trainer_computes(make: Make, dtype: DTypeName, tmp_path: Path) -> None:
    """The trainer computes with rounded weights, so whoever loads the published ones has the same log-probabilities."""
    trainer = make()
    for seed in range(2):
        update(trainer, seed, rate=1e-3)
    trainer.publish(tmp_path / "out")
    again = trainer_of(load_model(str(tmp_path / "out"), dtype=dtype), tmp_path / "out")
    np.testing.assert_array_equal(conformance.look(again), conformance.look(trainer))


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


def test_gradients_are_those_of_float32_but_for_rounding(model_folder: Path, dtype: DTypeName) -> None:
    wide, narrow = (trainer_of(load_model(str(model_folder), dtype=each), model_folder) for each in ("float32", dtype))
    np.testing.assert_allclose(conformance.look(narrow), conformance.look(wide), atol=0.1)
    norms = []
    for trainer in (wide, narrow):
        trainer.forward_backward(build_forest(conformance.lessons(0)))
        norms.append(trainer.optim_step(learning_rate=RATES["full"])["optim/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert all(p.dtype == getattr(torch, dtype) for p in narrow.model.hf.parameters())


def test_every_option_of_the_loss_trains(model_folder: Path, dtype: DTypeName) -> None:
    """Losses and values are in float32 whatever the weights are."""
    trainer = LocalTrainer(
        load_model(str(model_folder), dtype=dtype),
        config=TrainerConfig(threads=1, device="cpu"),
        loss=EVERYTHING,
        export=lambda model, path: None,
        critic=True,
    )
    for seed in range(2):
        update(trainer, seed, rate=RATES["full"])
    metrics = trainer.forward_backward(build_forest(conformance.lessons(0))).metrics
    assert metrics["loss/kl"] > 0 and metrics["critic/loss"] > 0


def test_exported_weights_have_the_dtype_of_the_model(make: Make, dtype: DTypeName, tmp_path: Path) -> None:
    trainer = make()
    conformance.step(trainer, 0)
    trainer.publish(tmp_path / "out")
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {getattr(torch, dtype)}


def test_float32_weights_are_their_own_masters(model_folder: Path) -> None:
    trainer = LocalTrainer(
        load_model(str(model_folder)),
        config=TrainerConfig(threads=1),
        loss=LossConfig(),
        export=lambda model, path: None,
    )
    assert all(p is trainer._masters.tensors[name] for name, p in trainer.model.hf.named_parameters())


def fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("it fails")


@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_pass_that_fails_leaves_the_gradient_as_it_was(make: Make, earlier: int, tmp_path: Path) -> None:
    """It fails at the weight that is reached last, when most others have a gradient."""
    trainer, undisturbed = make(), make()
    for seed in range(earlier):
        for each in (trainer, undisturbed):
            each.forward_backward(build_forest(conformance.lessons(seed)))
    hook = next(iter(trainer.model.trainable().values())).register_hook(fail)
    with pytest.raises(ValueError, match="it fails"):
        trainer.forward_backward(build_forest(conformance.lessons(5)))
    hook.remove()
    for a, b in zip(trainer._masters.tensors.values(), undisturbed._masters.tensors.values(), strict=True):
        if a.grad is None or b.grad is None:
            assert a.grad is b.grad
        else:
            assert torch.equal(a.grad, b.grad)
    assert trainer.optim_step(learning_rate=1e-2)["optim/skipped"] == 1.0
