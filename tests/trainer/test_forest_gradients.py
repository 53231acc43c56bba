"""Invariants 4 and 5: however packed, a forest has the loss and gradient of one call at a time, for every loss.

The reference is a plain Hugging Face forward of one call after the other, with the losses written out once more by
hand.
"""

import copy
import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.packing import pack, teaching_under
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
LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "dual": {"clip_dual": 1.3},
    "gspo": {"ratio": "call", "clip_low": 0.1, "clip_high": 0.1},
    "gspo of rollouts": {"ratio": "rollout", "clip_low": 0.1, "clip_high": 0.1, "clip_dual": 1.1},
    "cispo": {"name": "cispo"},
    "cispo of calls": {"name": "cispo", "ratio": "call", "clip_low": 0.1, "clip_high": 0.1},
    "decoupled": {"proximal": True},
    "decoupled, corrected": {"proximal": True, "importance": "call-mask"},
    "k1": {"kl_coef": 0.3, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.3, "kl_estimator": "k3"},
    "entropy": {"entropy_coef": 0.2},
    "critic": {"value_coef": 0.7},
    "pg": {"name": "pg"},
    **{
        f"pg, {level}{how}": {"name": "pg", "importance": level + how, "importance_cap": 1.3}
        for level in ("token", "call", "rollout")
        for how in ("", "-mask")
    },
    "everything": {
        "ratio": "rollout",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "clip_dual": 1.05,
        "proximal": True,
        "importance": "rollout",
        "kl_coef": 0.1,
        "entropy_coef": 0.1,
        "value_coef": 0.3,
    },
}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "head_dim": 6}, tie_word_embeddings=False)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
}


class ExactNorm(nn.RMSNorm):
    variance_epsilon = 1e-6


def build(family: str = "qwen3") -> DenseModel:
    """Norms in float64: Hugging Face's compute in float32, whose rounding would show."""
    torch.manual_seed(3)
    hf = FAMILIES[family]().to(torch.float64)
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                exact = ExactNorm(child.weight.shape[0], eps=ExactNorm.variance_epsilon, dtype=torch.float64)
                nn.init.uniform_(exact.weight, 0.5, 1.5)
                setattr(parent, name, exact)
    return DenseModel(hf)


@dataclasses.dataclass
class Scene:
    """A trainer in the middle of training, and lessons for it."""

    trainer: LocalTrainer
    started: DenseModel
    given: list[Lesson]
    loss: LossConfig
    critic: bool

    def gradients(self) -> dict[str, Tensor]:
        head = self.trainer.critic.named_parameters() if self.trainer.critic else ()
        named = [*self.trainer.model.hf.named_parameters(), *((f"critic.{name}", p) for name, p in head)]
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def clear(self) -> None:
        self.trainer.model.hf.zero_grad()
        if self.trainer.critic:
            self.trainer.critic.zero_grad()

    def from_forests(self, packs: list[list[Lesson]]) -> tuple[float, dict[str, Tensor]]:
        self.clear()
        value = sum(self.trainer.forward_backward(build_forest(lessons)).metrics["loss/value"] for lessons in packs)
        return value, self.gradients()

    def one_call_at_a_time(self) -> tuple[float, dict[str, Tensor]]:
        self.clear()
        total = by_hand(self)
        total.backward()
        return total.item(), self.gradients()


def scene(name: str = "ppo_clip", seed: int = 5, *, family: str = "qwen3", **shape: int) -> Scene:
    """Move the policy away from its start, and the critic away from zero."""
    loss, critic = LossConfig(**LOSSES[name]), "value_coef" in LOSSES[name]
    model = build(family)
    started = DenseModel(copy.deepcopy(model.hf))
    trainer = LocalTrainer(
        model, config=TrainerConfig(threads=1), loss=loss, export=lambda model, path: None, critic=critic
    )
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in [*model.hf.parameters(), *(trainer.critic.parameters() if trainer.critic else ())]:
            p += 0.03 * torch.randn(p.shape, generator=noise, dtype=p.dtype)
    return Scene(
        trainer=trainer, started=started, given=centred(lessons(seed, **shape), trainer), loss=loss, critic=critic
    )


def centred(given: list[Lesson], trainer: LocalTrainer) -> list[Lesson]:
    """Logprobs, recorded and proximal, around the true ones: some ratios are clipped, some not. Some weights are 0."""
    rng = np.random.default_rng(1)
    made: list[Lesson] = []
    for i, lesson in enumerate(given):
        found = trainer.evaluate(build_forest([lesson], whole=True)).logprobs
        proximal, recorded = (found + 0.3 * rng.normal(size=found.shape) for _ in range(2))
        weights = lesson.weights * (i % 7 != 4)
        weights[0] *= i % 5 != 3
        call = dataclasses.replace(lesson.transition, logprobs=recorded.astype(np.float32))
        made.append(dataclasses.replace(lesson, transition=call, proximal=proximal, weights=weights))
    return made


def by_hand(s: Scene) -> Tensor:
    """The objective, computed token by token from its definition."""
    hf, loss = s.trainer.model.hf, s.loss
    tokens: list[dict[str, Any]] = []
    total = torch.zeros((), dtype=torch.float64)
    for index, lesson in enumerate(s.given):
        call, P = lesson.transition, len(lesson.transition.prompt_ids)
        ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
        out = hf(input_ids=ids, use_cache=False, output_hidden_states=True)
        logits = out.logits[0, P - 1 : -1] / call.temperature
        with torch.no_grad():
            started = s.started.hf(input_ids=ids, use_cache=False).logits[0, P - 1 : -1] / call.temperature
        assert lesson.proximal is not None
        for t, token in enumerate(call.completion_ids.tolist()):
            if lesson.weights[t]:
                logp, first = logits[t].log_softmax(0), started[t].log_softmax(0)
                tokens.append(
                    {
                        "new": logp[token],
                        "first": first[token],
                        "recorded": float(call.logprobs[t]),
                        "proximal": float(lesson.proximal[t]),
                        "entropy": -(logp.exp() * logp).sum(),
                        "A": float(lesson.advantages[t]),
                        "w": float(lesson.weights[t]),
                        "token": (index, t),
                        "call": index,
                        "rollout": lesson.rollout_id,
                    }
                )
        if s.trainer.critic is not None and out.hidden_states is not None:
            value = s.trainer.critic(out.hidden_states[-1][0, P - 1])[0]
            total = total + loss.value_coef * float(lesson.weights.sum()) * (value - lesson.returns) ** 2
    for x in tokens:
        policy = policy_loss(x, tokens, loss) * importance(x, tokens, loss)
        delta = x["new"] - x["first"]
        kl = {
            "k1": delta.detach() * x["new"] + (delta - delta * x["new"]).detach(),
            "k2": delta**2 / 2,
            "k3": (-delta).exp() - 1 + delta,
        }[loss.kl_estimator]
        total = total + x["w"] * (policy + loss.kl_coef * kl - loss.entropy_coef * x["entropy"])
    return total


def policy_loss(x: dict[str, Any], tokens: list[dict[str, Any]], loss: LossConfig) -> Tensor:
    if loss.name == "pg":
        return -x["A"] * x["new"]
    old = "proximal" if loss.proximal else "recorded"
    mates = [y for y in tokens if y[loss.ratio] == x[loss.ratio]]
    r = torch.stack([y["new"] - y[old] for y in mates]).mean().exp()
    held = min(max(r.item(), 1 - loss.clip_low), 1 + loss.clip_high)
    if loss.name == "cispo":
        return -held * x["A"] * x["new"]
    objective = r * x["A"] if r.item() * x["A"] <= held * x["A"] else r.new_tensor(held * x["A"])
    if loss.clip_dual and x["A"] < 0 and objective.item() < loss.clip_dual * x["A"]:
        return r.new_tensor(-loss.clip_dual * x["A"])
    return -objective


def importance(x: dict[str, Any], tokens: list[dict[str, Any]], loss: LossConfig) -> float:
    if loss.importance == "none":
        return 1.0
    level, masked = loss.importance.removesuffix("-mask"), loss.importance.endswith("-mask")
    mates = [y for y in tokens if y[level] == x[level]]
    ratio = math.prod(
        math.exp((y["new"].item() if loss.name == "pg" else y["proximal"]) - y["recorded"]) for y in mates
    )
    if ratio <= loss.importance_cap:
        return ratio
    return 0.0 if masked else loss.importance_cap


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error over the parameters."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - g).norm() / g.norm()) for name, g in expected.items() if float(g.norm()) > 1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_forest_has_the_gradient_of_one_call_at_a_time(name: str) -> None:
    s = scene(name)
    value, expected = s.one_call_at_a_time()
    found_value, found = s.from_forests([s.given])
    assert abs(found_value - value) < 1e-12 * max(abs(value), 1.0)
    assert error(found, expected) < 1e-12


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["ppo_clip", "everything"])
def test_any_shape_has_the_gradient_of_one_call_at_a_time(
    seed: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forest_attention, "BLOCK", 2 + seed)  # segments of a few tokens are cut into blocks, too
    s = scene(name, seed, groups=1 + seed % 3, group_size=1 + seed, turns=1 + seed % 4)
    value, expected = s.one_call_at_a_time()
    found_value, found = s.from_forests([s.given])
    assert abs(found_value - value) < 1e-12 * max(abs(value), 1.0)
    assert error(found, expected) < 1e-12


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_has_the_gradient_of_one_call_at_a_time(family: str) -> None:
    s = scene("ppo_clip", 7, family=family)
    _, expected = s.one_call_at_a_time()
    _, found = s.from_forests([s.given])
    assert error(found, expected) < 1e-12


def test_these_tests_clip_ratios_and_share_prefixes() -> None:
    s = scene("everything", group_size=6)
    forest = build_forest(s.given)
    metrics = s.trainer.forward_backward(forest).metrics
    for name in (
        "loss/clip_fraction_low",
        "loss/clip_fraction_high",
        "loss/clip_fraction_dual",
        "loss/importance_capped",
    ):
        assert 0.03 < metrics[name] < 0.9, name
    assert metrics["loss/kl"] > 1e-3
    assert len(set(forest.sources.tolist())) < len(forest.sources)  # one token taught by several calls
    assert (forest.parents == -1).sum() > 2
    assert len(forest.token_ids) < 0.7 * sum(
        len(le.transition.prompt_ids) + len(le.transition.completion_ids) for le in s.given
    )
    assert any(len(le.transition.completion_ids) == 1 for le in s.given)
    assert any(0 < np.count_nonzero(le.weights) < len(le.weights) for le in s.given)


@pytest.mark.parametrize("name", list(LOSSES))
def test_packing_and_order_change_neither_loss_nor_gradient(name: str) -> None:
    """Also if calls without an advantage are left out, as they are where the loss has no gradient for them."""
    s = scene(name, 4, groups=3)
    silent = {s.given[0].rollout_id, s.given[-2].rollout_id}
    s.given = [
        dataclasses.replace(le, advantages=le.advantages * (le.rollout_id not in silent and i % 6 > 0))
        for i, le in enumerate(s.given)
    ]
    value, expected = s.from_forests([s.given])
    for max_tokens in (1, 40):
        shuffled = random.Random(max_tokens).sample(s.given, len(s.given))
        packs = pack(shuffled, max_tokens=max_tokens, teaching=teaching_under(s.loss, critic=s.critic))
        assert len(packs) > 1
        found_value, found = s.from_forests(packs)
        assert abs(found_value - value) < 1e-12
        assert error(found, expected) < 1e-12


def test_splitting_a_sequence_would_change_the_gradient() -> None:
    """So `pack` and `minibatches` never split a sequence."""
    s = scene("gspo of rollouts")
    _, expected = s.from_forests([s.given])
    _, found = s.from_forests([[le] for le in s.given if le.weights.any()])
    assert error(found, expected) > 1e-2
