"""Loss scaling of float16: gradients that would vanish or overflow are computed, and no forest is lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, Lesson, build_forest
from lightningrl.models.load import DTypeName, load_model
from lightningrl.models.lora import with_adapter
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer
from lightningrl.trainer.scaling import GROWTH_FORESTS, INITIAL, SMALLEST, LossScale, smaller


def trainer_of(folder: Path, dtype: DTypeName, *, rank: int = 0, critic: bool = False) -> LocalTrainer:
    model = load_model(str(folder), dtype=dtype)
    return LocalTrainer(
        with_adapter(model, rank=rank) if rank else model,
        config=TrainerConfig(threads=1, device="cpu"),
        loss=LossConfig(name="pg"),
        export=lambda model, path: None,
        critic=critic,
    )


def weighted(factor: float, seed: int = 0) -> Forest:
    """A forest whose gradient is large or small: every weight times `factor`."""
    return build_forest([_times(lesson, factor) for lesson in conformance.lessons(seed)])


def _times(lesson: Lesson, factor: float) -> Lesson:
    return replace(lesson, weights=lesson.weights * factor)


def gradients(trainer: LocalTrainer, forests: Sequence[Forest]) -> dict[str, Tensor]:
    for forest in forests:
        trainer.forward_backward(forest)
    return {name: p.grad.double() for name, p in trainer._masters.tensors.items() if p.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative error of all gradients together."""
    assert found.keys() == expected.keys()
    errors = sum(float((found[name] - expected[name]).square().sum()) for name in found)
    return (errors / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_far_below_the_range_of_float16_are_computed(model_folder: Path, rank: int) -> None:
    """A loss of a ten-thousandth, as in a batch of many tokens: without a factor most of its gradient would be zero."""
    forest = weighted(1e-4)
    wide = gradients(trainer_of(model_folder, "float32", rank=rank), [forest])
    scaled = trainer_of(model_folder, "float16", rank=rank)
    bare = trainer_of(model_folder, "float16", rank=rank)
    bare._scale.value = None
    assert distance(gradients(scaled, [forest]), wide) < 0.02
    assert distance(gradients(bare, [forest]), wide) > 0.1
    assert scaled.optim_step(learning_rate=1e-4)["optim/skipped"] == 0.0


@pytest.mark.parametrize("rank", [0, 4])
def test_a_forest_whose_gradient_overflows_is_done_again_and_nothing_is_lost(model_folder: Path, rank: int) -> None:
    """Also for a critic's head, and beside forests that were added before."""
    forests = [weighted(1e-3, 1), weighted(100.0, 0), weighted(1e-2, 2)]
    wide, narrow = (trainer_of(model_folder, dtype, rank=rank, critic=True) for dtype in ("float32", "float16"))
    expected, found = gradients(wide, forests), gradients(narrow, forests)
    assert narrow._scale.value is not None and SMALLEST < narrow._scale.value < INITIAL
    assert distance(found, expected) < 0.02
    assert narrow.optim_step(learning_rate=1e-4)["optim/skipped"] == 0.0


def test_a_gradient_that_no_factor_makes_finite_skips_the_update_and_keeps_the_factor(model_folder: Path) -> None:
    trainer, clean = (trainer_of(model_folder, "float16") for _ in range(2))
    broken = next(trainer.model.hf.parameters()).register_hook(lambda g: g * float("inf"))
    trainer.forward_backward(weighted(1e-3))
    broken.remove()
    trainer.forward_backward(weighted(1e-3, 1))
    assert trainer.optim_step(learning_rate=1e-2)["optim/skipped"] == 1.0
    assert trainer._scale.value == INITIAL
    np.testing.assert_array_equal(conformance.look(trainer), conformance.look(clean))


def test_resuming_keeps_the_factor_and_the_bits(model_folder: Path, tmp_path: Path) -> None:
    straight, resumed = (trainer_of(model_folder, "float16") for _ in range(2))
    straight.forward_backward(weighted(100.0))
    straight.optim_step(learning_rate=1e-4)
    straight.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    assert resumed._scale.counters() == straight._scale.counters() != LossScale(torch.float16).counters()
    for trainer in (straight, resumed):
        trainer.forward_backward(weighted(1e-3, 1))
        trainer.optim_step(learning_rate=1e-4)
    np.testing.assert_array_equal(conformance.look(resumed), conformance.look(straight))


def test_the_factor_doubles_after_many_forests_without_an_overflow() -> None:
    scale = LossScale(torch.float16)
    scale.fits(INITIAL / 4)
    for _ in range(GROWTH_FORESTS):
        assert scale.value == INITIAL / 4
        scale.fits(INITIAL / 4)
    assert scale.value == INITIAL / 2


def test_factors_halve_down_to_a_bound() -> None:
    assert smaller(INITIAL) == INITIAL / 2
    assert smaller(2 * SMALLEST) == SMALLEST
    assert smaller(SMALLEST) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_only_float16_is_scaled(dtype: torch.dtype) -> None:
    scale = LossScale(dtype)
    assert scale.value is None and scale.counters() == {}
