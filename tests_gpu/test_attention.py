"""The flash-attention kernel over forests, against the reference in float32."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightningrl.data.trie import Trie, build_trie
from lightningrl.models.base import PLAIN, Attend, Style
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.models.varlen_attention import VarlenAttention, by_forest_attention, forest_attention
from tests.models.test_varlen_plan import chain, random_trie

ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest relative error: five times the 2⁻⁸ and 2⁻¹¹ to which these dtypes round a number."""


@dataclass(kw_only=True)
class Shape:
    """What an `Attend` reads of a model."""

    heads: int
    kv_heads: int
    dtype: torch.dtype
    device: torch.device


def tries() -> dict[str, Trie]:
    rng = np.random.default_rng(0)
    long = rng.integers(0, 9, 700).astype(np.int32)
    group = [np.concatenate((long, rng.integers(0, 9, n).astype(np.int32))) for n in (1, 3, 70, 128, 200, 333)]
    return {
        "random": random_trie(1, sequences=40, words=3, longest=60),
        "a group": build_trie(group, tails=[1] * len(group)),
        "one conversation": chain(300, 1, 500),
        "tokens alone": build_trie([np.array([i], np.int32) for i in range(50)], tails=[1] * 50),
    }


def inputs(trie: Trie, model: Any, *, size: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    random = torch.Generator(model.device).manual_seed(0)
    N, H, K = len(trie.token_ids), model.heads, model.kv_heads
    made = [torch.randn(N, heads, size, generator=random, device=model.device) for heads in (H, K, K, H)]
    return [x.to(model.dtype) for x in made]


def computed(attend: Attend, given: list[Tensor], style: Style = PLAIN) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = attend(0, q, k, v, style)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def reference(trie: Trie, model: Any) -> ForestAttention:
    return by_forest_attention(trie.starts, trie.parents, trie.positions, model=model, dtype=torch.float32)


@pytest.mark.parametrize("style", [PLAIN, Style(scale=0.2), Style(window=40)], ids=["plain", "scale", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (16, 8, 128), (4, 4, 24), (4, 1, 256)])
@pytest.mark.parametrize("name", list(tries()))
def test_the_kernel_has_the_output_and_gradients_of_the_reference(
    name: str, heads: int, kv_heads: int, size: int, dtype: torch.dtype, style: Style, flash: torch.device
) -> None:
    trie, model = tries()[name], Shape(heads=heads, kv_heads=kv_heads, dtype=dtype, device=flash)
    given = inputs(trie, model, size=size)
    ours: Any = forest_attention(trie.starts, trie.parents, trie.positions, model=model)  # pyright: ignore[reportArgumentType]
    assert type(ours) is VarlenAttention
    found = computed(ours, given, style)
    expected = computed(reference(trie, model), [x.float() for x in given], style)
    zero = 1e-3 * float(expected[0].norm())  # a token alone has gradients of rounding errors
    for a, b in zip(found, expected, strict=True):
        assert float((a.float() - b).norm()) < ROUNDING[dtype] * max(float(b.norm()), zero)


def test_equal_inputs_give_equal_bits(flash: torch.device) -> None:
    trie, model = tries()["a group"], Shape(heads=16, kv_heads=8, dtype=torch.bfloat16, device=flash)
    given = inputs(trie, model, size=128)
    ours = forest_attention(trie.starts, trie.parents, trie.positions, model=model)  # pyright: ignore[reportArgumentType]
    first = computed(ours, given)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(computed(ours, given), first, strict=True))


def test_the_reference_computes_the_same_on_every_device(device: torch.device) -> None:
    trie = tries()["random"]
    here, there = (
        Shape(heads=4, kv_heads=2, dtype=torch.float32, device=where) for where in (device, torch.device("cpu"))
    )
    given = inputs(trie, here, size=16)
    found = computed(reference(trie, here), given)
    expected = computed(reference(trie, there), [x.cpu() for x in given])
    assert all(float((a.cpu() - b).norm() / b.norm()) < 1e-5 for a, b in zip(found, expected, strict=True))
