"""Losses against their equations: values and gradients in closed form, and expectations over small distributions."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from lightningrl.config import LossConfig
from lightningrl.data.forest import Forest, Lesson, build_forest
from lightningrl.trainer import conformance
from lightningrl.trainer.importance import importance_weights
from lightningrl.trainer.kl import kl
from lightningrl.trainer.logprobs import Rows, term_logprobs
from lightningrl.trainer.losses import LOSSES, Terms

CALLS = [0, 0, 0, 1, 1, 2]
NEW = [-1.0, -0.4, -2.0, -1.5, -0.3, -0.9]
OLD = [-1.5, -0.4, -1.0, -1.4, -0.9, -1.0]
A = [1.0, -2.0, -1.5, 0.5, 2.0, -1.0]
R = [math.exp(new - old) for new, old in zip(NEW, OLD, strict=True)]  # 1.65, 1, .37, .90, 1.82, 1.11
S = [
    math.exp(sum(math.log(R[j]) for j in range(6) if CALLS[j] == c) / CALLS.count(c)) for c in CALLS
]  # .85 ×3, 1.28 ×2, 1.11


def loss_and_gradient(
    *, sequences: list[int] | None = None, **settings: Any
) -> tuple[list[float], list[float], dict[str, list[bool]]]:
    """Loss of each token, gradient of their sum with respect to each logprob, and clipped tokens."""
    logprobs = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (OLD, A))
    config = LossConfig(**settings)
    index = None if sequences is None else torch.tensor(sequences)
    losses, clips = LOSSES[config.name](
        Terms(logprobs=logprobs, old_logprobs=old, advantages=advantages, sequences=index), config
    )
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.tolist(), logprobs.grad.tolist(), {why: which.tolist() for why, which in clips.items()}


def test_pg_pushes_by_the_advantage() -> None:
    losses, gradient, _ = loss_and_gradient(name="pg")
    assert losses == pytest.approx([-a * new for a, new in zip(A, NEW, strict=True)])
    assert gradient == pytest.approx([-a for a in A])


def test_clipped_ratio_has_a_gradient_only_back_towards_one() -> None:
    losses, gradient, clips = loss_and_gradient(clip_low=0.2, clip_high=0.3)
    assert clips == {"low": [False, False, True, False, False, False], "high": [True, False, False, False, True, False]}
    assert gradient == pytest.approx([0, -R[1] * A[1], 0, -R[3] * A[3], 0, -R[5] * A[5]])
    assert losses == pytest.approx([-1.3 * A[0], -R[1] * A[1], -0.8 * A[2], -R[3] * A[3], -1.3 * A[4], -R[5] * A[5]])


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    losses, gradient, clips = loss_and_gradient(clip_dual=1.05)
    assert clips["dual"] == [False, False, False, False, False, True]
    assert losses[5] == pytest.approx(-1.05 * A[5])
    assert gradient[5] == 0.0
    assert loss_and_gradient(clip_dual=3.0)[:2] == loss_and_gradient()[:2]


def test_ratio_of_a_sequence_is_a_geometric_mean_and_its_gradient_reaches_every_token() -> None:
    """s = (∏ r)^(1/|y|), ds / d log π_t = s / |y|: all advantages of a call flow through all of its tokens (arXiv
    2507.18071, eq. 10).
    """
    losses, gradient, clips = loss_and_gradient(sequences=CALLS, ratio="call", clip_low=0.2, clip_high=0.2)
    assert clips == {"low": [False] * 6, "high": [False, False, False, True, True, False]}
    assert losses == pytest.approx([-S[0] * A[0], -S[0] * A[1], -S[0] * A[2], -1.2 * A[3], -1.2 * A[4], -S[5] * A[5]])
    shared = -S[0] / 3 * (A[0] + A[1] + A[2])
    assert gradient == pytest.approx([shared, shared, shared, 0, 0, -S[5] * A[5]])


@pytest.mark.parametrize("name", ["ppo_clip", "cispo"])
def test_sequences_of_one_token_have_the_ratio_of_the_token(name: str) -> None:
    assert loss_and_gradient(name=name, sequences=list(range(6))) == loss_and_gradient(name=name)


def test_clipped_weight_still_has_a_gradient() -> None:
    losses, gradient, clips = loss_and_gradient(name="cispo", clip_low=1.0, clip_high=0.3)
    held = [min(r, 1.3) for r in R]
    assert gradient == pytest.approx([-w * a for w, a in zip(held, A, strict=True)])
    assert losses == pytest.approx([-w * a * new for w, a, new in zip(held, A, NEW, strict=True)])
    assert clips["high"] == [True, False, False, False, True, False] and not any(clips["low"])


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize(("estimator", "forward"), [("k1", False), ("k2", False), ("k3", True)])
def test_kl_estimates_have_the_documented_gradients(estimator: Any, forward: bool) -> None:
    """Expectations over the policy, exactly: every token, weighted by its probability."""
    logits = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).softmax(0)
    p = logits.softmax(0)
    (expected,) = torch.autograd.grad(divergence(q, p) if forward else divergence(p, q), logits, retain_graph=True)
    estimates = kl(logits.log_softmax(0), q.log(), estimator)
    (found,) = torch.autograd.grad((p.detach() * estimates).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    if estimator != "k2":  # k2 is biased
        assert (p * estimates).sum().item() == pytest.approx(divergence(p, q).item(), rel=1e-12)


def test_logprobs_and_entropy_have_the_gradient_of_plain_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, dtype=torch.float64, generator=generator).requires_grad_()
    of_term, targets, temperatures = (
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([3, 0, 6, 6]),
        torch.tensor([[1.0], [0.7], [1.3]], dtype=torch.float64),
    )
    rows = Rows(sources=torch.arange(3), temperatures=temperatures, of_term=of_term, targets=targets)
    a, b = (
        torch.randn(4, dtype=torch.float64, generator=generator),
        torch.randn(3, dtype=torch.float64, generator=generator),
    )
    logprobs, entropies = term_logprobs(logits, rows, entropy_gradient=True)
    (found,) = torch.autograd.grad((a * logprobs).sum() + (b * entropies).sum(), logits)
    plain = (logits / temperatures).log_softmax(1)
    (expected,) = torch.autograd.grad(
        (a * plain[of_term, targets]).sum() - (b * (plain.exp() * plain).sum(1)).sum(), logits
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert not term_logprobs(logits, rows)[1].requires_grad


def forest_of(*completions: tuple[str, list[float]]) -> Forest:
    """A forest of calls of named rollouts with these recorded logprobs."""
    rng, made = np.random.default_rng(0), list[Lesson]()
    for i, (rollout_id, recorded) in enumerate(completions):
        lesson = conformance.lesson("g", f"{rollout_id}/{i}", [1, 2], [3] * len(recorded), rng=rng)
        call = dataclasses.replace(lesson.transition, logprobs=np.array(recorded, np.float32))
        made.append(dataclasses.replace(lesson, transition=call))
    return build_forest(made)


@pytest.mark.parametrize(
    ("importance", "expected"),
    [
        ("token", [1.5, 1.2, 2, 2, 0.5, 1]),
        ("token-mask", [1.5, 1.2, 0, 2, 0.5, 1]),
        ("call", [1.8, 1.8, 2, 2, 0.5, 1]),
        ("call-mask", [1.8, 1.8, 0, 0, 0.5, 1]),
        ("rollout", [2, 2, 2, 2, 0.5, 0.5]),
        ("rollout-mask", [0, 0, 0, 0, 0.5, 0.5]),
    ],
)
def test_importance_weights_are_products_truncated_or_masked(importance: Any, expected: list[float]) -> None:
    ratios = [[1.5, 1.2], [4.0, 2.0 - 1e-6], [0.5], [1.0]]
    forest = forest_of(*zip(["a", "a", "b", "b"], [[-math.log(r) for r in call] for call in ratios], strict=True))
    behaviour = torch.from_numpy(forest.logprobs)
    u, exceeds = importance_weights(
        torch.zeros(6, dtype=torch.float64), behaviour, forest, LossConfig(name="pg", importance=importance)
    )
    assert u.tolist() == pytest.approx(expected, abs=1e-5)
    assert exceeds.sum() == {"token": 1, "call": 2, "rollout": 4}[importance.removesuffix("-mask")]


def test_importance_of_a_nearly_impossible_token_is_the_cap() -> None:
    forest = forest_of(("a", [-1e4] * 20))
    zero = torch.zeros(20)
    for importance, expected in (("rollout", 2.0), ("rollout-mask", 0.0)):
        config = LossConfig.model_validate({"name": "pg", "importance": importance})
        assert importance_weights(zero, torch.from_numpy(forest.logprobs), forest, config)[0].tolist() == pytest.approx(
            [expected] * 20
        )


def test_ratio_is_corrected_once() -> None:
    for name in ("ppo_clip", "cispo"):
        with pytest.raises(ValidationError, match="proximal"):
            LossConfig.model_validate({"name": name, "importance": "token"})
        LossConfig.model_validate({"name": name, "importance": "token", "proximal": True})
