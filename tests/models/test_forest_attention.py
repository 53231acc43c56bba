"""`ForestAttention` in every `Style` computes the softmax over each token's path, and its gradient."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightningrl.data.trie import build_trie
from lightningrl.models import forest_attention
from lightningrl.models.base import Style
from lightningrl.models.forest_attention import ForestAttention

H, K, E = 4, 2, 6
STYLES = {
    "plain": {},
    "scale": {"scale": 0.3},
    "soft cap": {"softcap": 1.5},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "long window": {"window": 50},
    "sinks": {"sinks": True},
    "everything": {"scale": 0.7, "softcap": 2.0, "window": 4, "sinks": True},
}


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 9, 11)
    grown = [np.concatenate((stem[: rng.integers(1, 12)], rng.integers(0, 3, rng.integers(1, 9)))) for _ in range(9)]
    return [*grown, rng.integers(20, 29, 13)]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, positions: np.ndarray, style: Style) -> Tensor:
    """The definition: one token and one head after the other."""
    path: list[int] = []
    rows: list[Tensor] = []
    for token, position in enumerate(positions.tolist()):
        path = [*path[:position], token]
        seen = path[-style.window :] if style.window is not None else path
        heads: list[Tensor] = []
        for h in range(H):
            scores = k[seen, h * K // H] @ q[token, h] * (E**-0.5 if style.scale is None else style.scale)
            if style.softcap is not None:
                scores = style.softcap * (scores / style.softcap).tanh()
            if style.sinks is not None:
                scores = torch.cat((scores, style.sinks[h : h + 1]))
            heads.append(scores.softmax(0)[: len(seen)] @ v[seen, h * K // H])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("value_size", [E, 3])
@pytest.mark.parametrize("block", [3, 64])
@pytest.mark.parametrize("name", list(STYLES))
def test_forest_attention_is_the_softmax_over_each_path(
    name: str, block: int, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forest_attention, "BLOCK", block)
    trie = build_trie(sequences(), tails=[1] * 10)
    attend = ForestAttention(
        trie.starts,
        trie.parents,
        trie.positions,
        heads=H,
        kv_heads=K,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    rng = torch.Generator().manual_seed(1)
    N = len(trie.token_ids)
    q, k, v, probe = (
        torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()
        for shape in ((H, N, E), (K, N, E), (K, N, value_size), (N, H, value_size))
    )
    leaves = [q, k, v]
    settings = dict(STYLES[name])
    if settings.pop("sinks", False):
        settings["sinks"] = torch.randn(H, generator=rng, dtype=torch.float64).requires_grad_()
        leaves.append(settings["sinks"])
    style = Style(**settings)
    Q, K_, V = (x.transpose(0, 1) for x in (q, k, v))  # not contiguous, as Hugging Face has them
    found, expected = attend(0, Q, K_, V, style), token_by_token(Q, K_, V, trie.positions, style)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for mine, true in zip(
        torch.autograd.grad(found, leaves, probe), torch.autograd.grad(expected, leaves, probe), strict=True
    ):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)
