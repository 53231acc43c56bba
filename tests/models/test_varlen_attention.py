"""The flash-attention kernel over a forest: by an emulation, it computes what `ForestAttention` does."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from lightningrl.data.trie import Trie, build_trie
from lightningrl.models import varlen_attention
from lightningrl.models.base import PLAIN, Attend, Style
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.models.tiny import build_model
from lightningrl.models.varlen_attention import VarlenAttention, by_forest_attention, forest_attention, has_flash
from tests.models import kernel
from tests.models.test_varlen_plan import chain, path_of, random_trie


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation computes in float64."""
    monkeypatch.setattr(varlen_attention, "DTYPES", frozenset({torch.float64}))


@dataclass(kw_only=True)
class Shape:
    """What an `Attend` reads of a model."""

    heads: int = 4
    kv_heads: int = 2
    dtype: torch.dtype = torch.float64
    device: torch.device


def model_of(heads: int = 4, kv_heads: int = 2) -> Any:
    return Shape(heads=heads, kv_heads=kv_heads, device=torch.device("cpu"))


def pair(trie: Trie, model: Any) -> tuple[VarlenAttention, ForestAttention]:
    forest = trie.starts, trie.parents, trie.positions
    return VarlenAttention(*forest, model=model), by_forest_attention(*forest, model=model)


def inputs(N: int, model: Any, *, size: int = 8, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    random = torch.Generator().manual_seed(seed)
    H, K = model.heads, model.kv_heads
    return [torch.randn(N, heads, size, generator=random, dtype=torch.float64) for heads in (H, K, K, H)]


def computed(attend: Attend, given: list[Tensor], style: Style) -> list[Tensor]:
    """Output, and gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    out = attend(0, q, k, v, style)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def difference_from_reference(trie: Trie, model: Any, *, size: int = 8) -> float:
    ours, reference = pair(trie, model)
    given = inputs(len(trie.token_ids), model, size=size)
    return difference(computed(ours, given, PLAIN), computed(reference, given, PLAIN))


def by_definition(trie: Trie) -> Attend:
    """Attention token by token, head by head."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
        scale = q.shape[2] ** -0.5 if style.scale is None else style.scale
        rows: list[Tensor] = []
        for token in range(len(q)):
            path = path_of(trie, token)
            path = path[-style.window :] if style.window else path
            for head in range(q.shape[1]):
                group = head * k.shape[1] // q.shape[1]
                rows.append(torch.softmax(scale * k[path, group] @ q[token, head], dim=0) @ v[path, group])
        return torch.stack(rows).view(q.shape)

    return attend


@pytest.mark.parametrize("seed", range(12))
def test_random_forests_have_the_output_and_gradients_of_the_reference(seed: int) -> None:
    heads, kv_heads = [(4, 2), (4, 4), (6, 1)][seed % 3]
    trie = random_trie(seed, sequences=1 + 5 * (seed % 4), words=1 + seed % 5, longest=1 + 7 * (seed % 6))
    assert difference_from_reference(trie, model_of(heads, kv_heads), size=[8, 16][seed % 2]) < 1e-12


@pytest.mark.parametrize(
    "trie",
    [
        pytest.param(chain(70, 1, 130, 5), id="one conversation of several segments"),
        pytest.param(chain(*[1] * 40), id="segments of one token"),
        pytest.param(
            build_trie([np.array([*range(i), 99], np.int32) for i in range(1, 60)], tails=[1] * 59), id="a deep chain"
        ),
        pytest.param(
            build_trie([np.array([7, 7, i, i + 1], np.int32) for i in range(80)], tails=[1] * 80), id="many branches"
        ),
        pytest.param(build_trie([np.array([5], np.int32)], tails=[1]), id="one token"),
    ],
)
def test_extreme_forests_have_the_output_and_gradients_of_the_reference(trie: Trie) -> None:
    assert difference_from_reference(trie, model_of()) < 1e-12


@pytest.mark.parametrize(
    "style", [PLAIN, Style(scale=0.7), Style(window=1), Style(window=5), Style(window=5, scale=2.0), Style(window=12)]
)
@pytest.mark.parametrize("seed", range(3))
def test_windows_and_scales_follow_their_definition(seed: int, style: Style) -> None:
    trie, model = random_trie(seed, sequences=6), model_of()
    ours, _ = pair(trie, model)
    given = inputs(len(trie.token_ids), model)
    assert difference(computed(ours, given, style), computed(by_definition(trie), given, style)) < 1e-12


def test_layers_may_have_windows_of_their_own() -> None:
    trie, model = random_trie(4), model_of()
    ours, _ = pair(trie, model)
    q, k, v, _ = inputs(len(trie.token_ids), model)
    for style in (Style(window=2), PLAIN, Style(window=4), Style(window=2)):
        assert float((ours(0, q, k, v, style) - by_definition(trie)(0, q, k, v, style)).abs().max()) < 1e-12


@pytest.mark.parametrize("keys_at_once", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_parts_change_nothing(seed: int, keys_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, model = np.random.default_rng(seed), model_of()
    rollouts = [np.append(np.zeros(20), rng.integers(0, 3, rng.integers(1, 9))).astype(np.int32) for _ in range(12)]
    trie = build_trie(rollouts, tails=[1] * len(rollouts))
    monkeypatch.setattr(varlen_attention, "KEYS_AT_ONCE", keys_at_once)
    ours, _ = pair(trie, model)
    assert len(ours._planned(None, model.device)) > 1
    assert difference_from_reference(trie, model) < 1e-12


def test_only_what_has_a_row_per_token_is_kept_for_the_backward_pass() -> None:
    trie, model = build_trie([np.array([7] * 50 + [i], np.int32) for i in range(9)], tails=[1] * 9), model_of()
    ours, _ = pair(trie, model)
    q, k, v, _ = (x.requires_grad_() for x in inputs(len(trie.token_ids), model))
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ours(0, q, k, v)
    assert kept
    assert max(max(x.shape) for x in kept) == len(trie.token_ids) == 59


@pytest.mark.parametrize(
    ("style", "size", "dtype"),
    [
        (Style(softcap=5.0), 8, torch.float64),
        (Style(sinks=torch.zeros(4, dtype=torch.float64)), 8, torch.float64),
        (PLAIN, 12, torch.float64),
        (PLAIN, 264, torch.float64),
        (PLAIN, 8, torch.float32),
    ],
    ids=["soft cap", "sinks", "head size 12", "head size 264", "another dtype"],
)
def test_what_the_kernel_cannot_compute_goes_to_the_reference(
    style: Style, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    trie, model = random_trie(1), model_of()
    model.dtype = dtype
    ours, reference = pair(trie, model)
    given = [x.to(dtype) for x in inputs(len(trie.token_ids), model, size=size)]
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", None)
    found, expected = computed(ours, given, style), computed(reference, given, style)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_cpu_keeps_the_reference() -> None:
    trie = random_trie(0)
    assert not has_flash(torch.device("cpu"))
    found = forest_attention(trie.starts, trie.parents, trie.positions, model=build_model(300))
    assert type(found) is ForestAttention


@pytest.mark.parametrize("window", [None, 3])
def test_the_operators_of_this_torch_take_our_arguments(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, which has shapes and no values, in the dtypes of the kernel."""
    monkeypatch.undo()
    trie, model = random_trie(2), model_of()
    model.device = torch.device("meta")
    q, k, v, grad = (x.to("meta", torch.bfloat16).requires_grad_() for x in inputs(len(trie.token_ids), model))
    out = VarlenAttention(trie.starts, trie.parents, trie.positions, model=model)(0, q, k, v, Style(window=window))
    found = torch.autograd.grad(out, (q, k, v), grad)
    assert [x.shape for x in (out, *found)] == [x.shape for x in (q, q, k, v)]
    assert {x.dtype for x in (out, *found)} == {torch.bfloat16}


def test_the_emulation_is_what_the_public_function_runs() -> None:
    q, k, v, _ = inputs(5, model_of())
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    varlen_attn: Any = torch.nn.attention.varlen.varlen_attn
    found = varlen_attn(q, k, v, ends, ends, 3, 3, scale=0.3, window_size=(-1, 0), enable_gqa=True)
    assert torch.equal(found, kernel.forward(q, k, v, ends, ends, 3, 3, True, 0.3, [-1, 0])[0])
