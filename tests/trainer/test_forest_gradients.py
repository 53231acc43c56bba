"""Invariants 4 and 5: a forest has the loss and the gradient of one call at a time, for every loss, however it is packed.

The reference is a plain Hugging Face forward of one call after the other, with the losses written out once more by hand.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, Lesson, build_forest
from lightningrl.data.packing import pack
from lightningrl.models import forest_attention
from lightningrl.models.dense import DenseModel
from lightningrl.trainer.conformance import lessons
from lightningrl.trainer.local import LocalTrainer

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "head_dim": 6}, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
}


class ExactNorm(nn.RMSNorm):
    variance_epsilon = 1e-6


def build(family: str = "qwen3") -> DenseModel:
    """In float64 throughout: Hugging Face's own norms go through float32, where the order of a sum would show."""
    torch.manual_seed(3)
    hf = FAMILIES[family]().to(torch.float64)
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                exact = ExactNorm(child.weight.shape[0], eps=ExactNorm.variance_epsilon, dtype=torch.float64)
                nn.init.uniform_(exact.weight, 0.5, 1.5)
                setattr(parent, name, exact)
    return DenseModel(hf)


def one_call_at_a_time(model: DenseModel, given: list[Lesson], loss: LossConfig) -> tuple[float, dict[str, Tensor]]:
    model.hf.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for lesson in given:
        call = lesson.transition
        ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
        logits = model.hf(input_ids=ids, use_cache=False).logits[0, len(call.prompt_ids) - 1 : -1] / call.temperature
        for t, token in enumerate(call.completion_ids.tolist()):
            logp = logits[t, token] - logits[t].logsumexp(0)
            A, w = float(lesson.advantages[t]), float(lesson.weights[t])
            if loss.name == "pg":
                total = total - w * A * logp
                continue
            r = (logp - float(call.logprobs[t])).exp()
            held = min(max(r.item(), 1 - loss.clip_low), 1 + loss.clip_high)
            total = total - w * (r * A if r.item() * A <= held * A else held * A)
    total.backward()
    return total.item(), gradients(model)


def gradients(model: DenseModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.hf.named_parameters() if p.grad is not None}


def from_forests(model: DenseModel, forests: list[Forest], loss: LossConfig) -> tuple[float, dict[str, Tensor]]:
    model.hf.zero_grad()
    trainer = LocalTrainer(model, config=TrainerConfig(threads=1), loss=loss, export=lambda model, path: None)
    value = sum(trainer.forward_backward(forest).metrics["loss/value"] for forest in forests)
    return value, gradients(model)


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative, parameter by parameter; the largest."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - g).norm() / g.norm()) for name, g in expected.items() if float(g.norm()) > 1e-12)


def centred(given: list[Lesson], model: DenseModel) -> list[Lesson]:
    """Recorded logprobs around the true ones, so that some ratios are clipped and others are not."""
    trainer = LocalTrainer(model, config=TrainerConfig(threads=1), loss=LossConfig(), export=lambda model, path: None)
    noise = torch.Generator().manual_seed(1)
    made: list[Lesson] = []
    for lesson in given:
        found = torch.from_numpy(trainer.forward_backward(build_forest([lesson])).logprobs)
        old = (found + 0.4 * torch.randn(found.shape, generator=noise, dtype=found.dtype)).to(torch.float32).numpy()
        made.append(dataclasses.replace(lesson, transition=dataclasses.replace(lesson.transition, logprobs=old)))
    return made


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["ppo_clip", "pg"])
def test_forest_has_the_gradient_of_one_call_at_a_time(seed: int, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest_attention, "BLOCK", 2 + seed)  # segments of a few tokens are cut into blocks, too
    model, loss = build(), LossConfig(name=name)
    given = centred(lessons(seed, groups=1 + seed % 3, group_size=1 + seed, turns=1 + seed % 4), model)
    value, expected = one_call_at_a_time(model, given, loss)
    found_value, found = from_forests(model, [build_forest(given)], loss)
    assert abs(found_value - value) < 1e-12 * max(abs(value), 1.0)
    assert error(found, expected) < 1e-12


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_has_the_gradient_of_one_call_at_a_time(family: str) -> None:
    model, loss = build(family), LossConfig()
    given = centred(lessons(7), model)
    _, expected = one_call_at_a_time(model, given, loss)
    _, found = from_forests(model, [build_forest(given)], loss)
    assert error(found, expected) < 1e-12


def test_clipping_and_sharing_do_happen_in_these_tests() -> None:
    model = build()
    given = centred(lessons(5, group_size=6), model)
    forest = build_forest(given)
    trainer = LocalTrainer(model, config=TrainerConfig(threads=1), loss=LossConfig(), export=lambda model, path: None)
    assert 0.1 < trainer.forward_backward(forest).metrics["loss/clip_fraction"] < 0.9
    assert len(set(forest.sources.tolist())) < len(forest.sources)  # one token taught by several calls
    assert (forest.parents == -1).sum() > 2
    assert len(forest.token_ids) < 0.7 * sum(len(le.transition.prompt_ids) + len(le.transition.completion_ids) for le in given)
    assert any(len(le.transition.completion_ids) == 1 for le in given)


@pytest.mark.parametrize("max_tokens", [1, 9, 25, 60])
def test_packing_and_order_change_neither_loss_nor_gradient(max_tokens: int) -> None:
    model, loss = build(), LossConfig()
    given = centred(lessons(4, groups=3), model)
    value, expected = from_forests(model, [build_forest(given)], loss)
    shuffled = random.Random(max_tokens).sample(given, len(given))
    packs = pack(shuffled, max_tokens=max_tokens)
    assert len(packs) > 1
    found_value, found = from_forests(model, [build_forest(p) for p in packs], loss)
    assert abs(found_value - value) < 1e-12
    assert error(found, expected) < 1e-12
