"""The budget of a pass: what fits, which passes compute their activations again, and that this changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models.dense import DenseModel
from lightningrl.models.lora import with_adapter
from lightningrl.models.tiny import build_model
from lightningrl.trainer import budget
from lightningrl.trainer.budget import LEAST, free_bytes, make_budget, tokens_that_fit
from lightningrl.trainer.conformance import lessons
from lightningrl.trainer.local import LocalTrainer
from lightningrl.trainer.logprobs import CHUNK
from lightningrl.trainer.masters import Masters


def model_of() -> DenseModel:
    return build_model(48, hidden=16, layers=3, heads=2, kv_heads=1, head_size=8, intermediate=32)


def settings(**given: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"threads": 1, **given})


def trainer_of(**given: Any) -> LocalTrainer:
    loss = LossConfig(kl_coef=0.1, entropy_coef=0.1)
    return LocalTrainer(model_of(), config=settings(**given), loss=loss, export=lambda model, path: None)


def learnt(trainer: LocalTrainer) -> tuple[float, list[Tensor]]:
    found = trainer.forward_backward(build_forest(lessons(0)))
    return found.metrics["loss/value"], [p.grad for p in trainer.model.hf.parameters() if p.grad is not None]


def test_checkpointing_changes_no_bit_of_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    hidden = DenseModel.hidden

    def seen(self: DenseModel, *args: Any, checkpointing: bool = False) -> Tensor:
        asked.append(checkpointing and torch.is_grad_enabled())
        return hidden(self, *args, checkpointing=checkpointing)

    monkeypatch.setattr(DenseModel, "hidden", seen)
    (loss, gradients), (loss_again, gradients_again) = (learnt(trainer_of(checkpointing=how)) for how in ("off", "on"))
    assert asked == [False, False, False, True]  # the reference never
    assert loss == loss_again
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))


def test_automatic_checkpointing_begins_where_a_pass_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK, "cpu", 1 << 10)
    model = model_of()
    tokens = tokens_that_fit(model, free_bytes=2e7, checkpointing=False)
    chosen = make_budget(model, settings(), free_bytes=2e7)
    assert 1 < tokens == chosen.kept < chosen.max_tokens == tokens_that_fit(model, free_bytes=2e7, checkpointing=True)
    assert make_budget(model, settings(checkpointing="on"), free_bytes=2e7).kept == 0
    off = make_budget(model, settings(checkpointing="off"), free_bytes=2e7)
    assert off.max_tokens == tokens < off.kept


def test_a_given_number_of_tokens_is_kept() -> None:
    for how in ("auto", "on", "off"):
        assert make_budget(model_of(), settings(max_tokens=77, checkpointing=how), free_bytes=1e6).max_tokens == 77


def test_no_memory_left_means_small_forests_with_checkpointing_or_one_rollout_at_a_time() -> None:
    for how in ("auto", "on"):
        found = make_budget(model_of(), settings(checkpointing=how), free_bytes=-1.0)
        assert found.max_tokens == LEAST and found.kept <= 1
    assert make_budget(model_of(), settings(checkpointing="off"), free_bytes=-1.0).max_tokens == 1


def test_weights_that_take_over_half_of_a_machine_leave_room_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK, "cpu", 1 << 10)
    model = model_of()
    masters = Masters(model.trainable())
    state = 4 * sum(p.nbytes for p in model.hf.parameters())  # and gradients, and two moments
    monkeypatch.setattr(budget, "machine_memory", lambda: int(1.8 * state))
    free = free_bytes(model, masters, frozen=())
    assert free == pytest.approx(0.4 * state, abs=1)
    assert make_budget(model, settings(checkpointing="off"), free_bytes=free).max_tokens > 1


def test_small_models_on_a_cpu_pack_as_many_tokens_as_are_allowed() -> None:
    trainer = trainer_of()
    assert trainer.max_tokens == 65536 == trainer_of().max_tokens
    assert trainer._budget.kept > 65536


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_moments_have_their_place_before_activations(
    rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DenseModel(model_of().hf.to(dtype))
    model = with_adapter(model, rank=rank) if rank else model
    masters = Masters(model.trainable())
    monkeypatch.setattr(budget, "machine_memory", lambda: 10**9)
    own = sum(p.nbytes for p in model.hf.parameters())
    learning = sum(p.numel() for p in model.trainable().values())
    narrow = rank == 0 and dtype == torch.bfloat16
    expected = 0.5 * (1e9 - own - learning * (3 * 4 + (4 + 2 if narrow else 0)))
    assert free_bytes(model, masters, frozen=()) == expected


def test_a_resumed_run_packs_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer_of()
    assert first._lower_budget(300) and not first._lower_budget(400)
    assert first._budget == budget.Budget(max_tokens=200, kept=299)
    first.save(tmp_path / "trainer")
    monkeypatch.setattr(budget, "machine_memory", lambda: 10**7)  # less is free than before
    resumed = trainer_of()
    resumed.load(tmp_path / "trainer")
    assert resumed._budget == first._budget


def test_settings_that_a_resumed_run_is_given_hold(tmp_path: Path) -> None:
    trainer_of(max_tokens=500).save(tmp_path / "trainer")
    resumed = trainer_of(max_tokens=70, checkpointing="on")
    resumed.load(tmp_path / "trainer")
    assert resumed._budget == budget.Budget(max_tokens=70, kept=0)
