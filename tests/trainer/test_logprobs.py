"""Log-probabilities in chunks: equal to those of all logits at once, and never are all logits in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models.tiny import build_model
from lightningrl.trainer import logprobs as module
from lightningrl.trainer.conformance import lessons
from lightningrl.trainer.local import LocalTrainer
from lightningrl.trainer.logprobs import Rows, head_logprobs, rows_at_once

R, M, D, V = 37, 90, 8, 211


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


def rows(dtype: torch.dtype) -> Rows:
    """Some rows are read by several terms, some by none."""
    noise = torch.Generator().manual_seed(0)
    return Rows(
        sources=torch.arange(R),
        temperatures=(0.5 + torch.rand(R, 1, generator=noise)).to(torch.promote_types(dtype, torch.float32)),
        of_term=torch.randint(0, R - 5, (M,), generator=noise),
        targets=torch.randint(0, V, (M,), generator=noise),
    )


def linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda hidden: hidden @ weight.t()


def capped(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda hidden: 3 * torch.tanh(hidden @ (2 * weight).t() / 3)


def gradients(
    head: Callable[[Tensor], Callable[[Tensor], Tensor]],
    *,
    size: int,
    dtype: torch.dtype = torch.float64,
    learns: bool = True,
    entropy: bool = True,
) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of hidden states and weight."""
    noise = torch.Generator().manual_seed(1)
    hidden = torch.randn(R, D, generator=noise).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=noise).to(dtype).requires_grad_(learns)
    logprobs, entropies = head_logprobs(head(weight), hidden, rows(dtype), size=size, entropy_gradient=entropy)
    loss = (torch.randn(M, generator=noise) * logprobs).sum()
    if entropy:
        loss = loss + (torch.randn(R, generator=noise) * entropies).sum()
    loss.backward()
    return [x for x in (logprobs.detach(), entropies.detach(), hidden.grad, weight.grad) if x is not None]


@pytest.mark.parametrize("head", [linear, capped])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("size", [1, 5, 36])
def test_chunks_have_the_values_and_gradients_of_all_rows_at_once(
    head: Any, learns: bool, entropy: bool, size: int
) -> None:
    expected = gradients(head, size=R, learns=learns, entropy=entropy)
    found = gradients(head, size=size, learns=learns, entropy=entropy)
    assert len(found) == len(expected) == 3 + learns
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_are_as_precise_as_all_rows_at_once(dtype: torch.dtype) -> None:
    """The weight's gradient is summed in float32: a sum of 37 chunks in bfloat16 would be 8 % further off."""
    exact = gradients(linear, size=R)
    found, whole = gradients(linear, size=1, dtype=dtype), gradients(linear, size=R, dtype=dtype)
    assert [x.dtype for x in found] == [x.dtype for x in whole]
    for a, b, c in zip(found, whole, exact, strict=True):
        assert float((a - c).norm()) < 1.05 * float((b - c).norm())


def test_all_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole training pass, of which all weights learn: the largest tensor is the LM head's weight or a chunk."""
    model = build_model(4001, hidden=16, layers=1, heads=2, kv_heads=1, head_size=8, intermediate=16)
    trainer = LocalTrainer(
        model, config=TrainerConfig(threads=1), loss=LossConfig(entropy_coef=0.1), export=lambda model, path: None
    )
    forest = build_forest(lessons(0))
    monkeypatch.setitem(module.CHUNK, "cpu", 10 * 4001)
    with Largest() as largest:
        trainer.forward_backward(forest)
    unique = len(set(forest.sources.tolist()))
    assert largest.elements == 16 * 4001 < unique * 4001
    with Largest() as largest:
        trainer.evaluate(forest)
    assert largest.elements <= 16 * 4001


@pytest.mark.parametrize("kind", ["tied", "apart", "frozen"])
def test_chunks_change_no_gradient_of_a_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Tensor]] = []
    for size in (1 << 20, 3 * 48):
        monkeypatch.setitem(module.CHUNK, "cpu", size)
        model = build_model(48, hidden=16, layers=2, heads=2, kv_heads=1, head_size=8, intermediate=16)
        model.hf.double()
        if kind == "apart":
            model.hf.lm_head.weight = nn.Parameter(model.hf.lm_head.weight.detach() * 2)
        if kind == "frozen":
            model.hf.lm_head.requires_grad_(False)
        config, loss = TrainerConfig(threads=1), LossConfig(entropy_coef=0.1)
        trainer = LocalTrainer(model, config=config, loss=loss, export=lambda model, path: None)
        trainer.forward_backward(build_forest(lessons(0)))
        found.append([p.grad for p in model.trainable().values() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6  # norms compute in float32


def test_a_small_vocabulary_is_one_chunk_and_a_large_one_about_a_thousand_rows_on_a_gpu() -> None:
    assert rows_at_once(1300, device=torch.device("cpu")) > 20_000
    assert rows_at_once(151_936, device=torch.device("cpu")) == 220
    assert rows_at_once(151_936, device=torch.device("cuda")) == 883
