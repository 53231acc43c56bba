"""The trainer on the device: the checks for all trainers, and the gradients of the CPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models.base import Decoder
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.tiny import build_model
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer

EVERYTHING = {
    "ratio": "rollout",
    "clip_low": 0.5,
    "clip_high": 0.5,
    "clip_dual": 3.0,
    "proximal": True,
    "importance": "call",
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("loss", [{}, EVERYTHING], ids=["plain", "every option"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_the_trainer_keeps_its_promises(
    check: Callable[[conformance.Make, Path], None],
    loss: dict[str, Any],
    model_folder: Path,
    tmp_path: Path,
    device: torch.device,
) -> None:
    export = partial(export_folder, tokenizer=load_tokenizer(str(model_folder)))
    check(
        lambda: LocalTrainer(
            load_model(str(model_folder), device=device),
            config=TrainerConfig(threads=1),
            loss=LossConfig.model_validate(loss),
            export=export,
            critic=bool(loss),
        ),
        tmp_path,
    )


def model_on(device: torch.device, dtype: torch.dtype) -> Decoder:
    """Equal weights on every device."""
    model = build_model(48, hidden=64, layers=2, heads=4, kv_heads=2, head_size=32, intermediate=96)
    model.hf.to(device)
    for parameter in model.hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def gradients(model: Decoder, parts: list[list[Any]]) -> dict[str, Tensor]:
    """Of the lessons in `parts`, each a forest, in float32 or wider."""
    trainer = LocalTrainer(model, config=TrainerConfig(threads=1), loss=LossConfig(), export=lambda model, path: None)
    seen: dict[str, Tensor] = {}
    for part in parts:
        trainer.forward_backward(build_forest(part))
    for name, p in trainer._policy.items():
        assert p.grad is not None
        seen[name] = p.grad.double().cpu()
    return seen


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - g).norm() / g.norm()) for name, g in expected.items())


def test_a_forest_has_the_gradient_of_one_call_at_a_time_and_of_the_cpu(device: torch.device) -> None:
    given = [lesson for lesson in conformance.lessons(0) if lesson.weights.any()]
    merged = gradients(model_on(device, torch.float64), [given])
    apart = gradients(model_on(device, torch.float64), [[lesson] for lesson in given])
    on_cpu = gradients(model_on(CPU, torch.float64), [given])
    assert largest_error(merged, apart) < 1e-12
    assert largest_error(merged, on_cpu) < 1e-5  # norms in float32


def test_bfloat16_has_the_gradient_of_float32_up_to_its_rounding(flash: torch.device) -> None:
    given = conformance.lessons(1, groups=4, group_size=8)
    exact = gradients(model_on(flash, torch.float32), [given])
    found = gradients(model_on(flash, torch.bfloat16), [given])
    again = gradients(model_on(flash, torch.bfloat16), [given])
    assert all(torch.equal(found[name], again[name]) for name in found)
    total = torch.cat([g.view(-1) for g in exact.values()])
    assert float((torch.cat([g.view(-1) for g in found.values()]) - total).norm() / total.norm()) < 0.1
