"""Attention over a forest: every token attends to its ancestors and itself, without computing shared prefixes twice.

The queries of a segment are cut into blocks. Blocks of similar size are padded together into batches that fit in the
CPU's cache. Keys are ordered by depth, so one comparison makes the mask: a query at position p attends to the keys 0..p
of its own path. In a layer with a window w, a block has the keys that any of its queries reaches, and a query at
position p attends to the keys p-w+1..p. The backward pass computes scores again, which is cheaper than storing them.

Legend: N tokens · S segments · B blocks of a batch · Q padded queries · T padded keys · H query heads · K key/value
heads · G = H / K query heads per key/value head · E head size · F value size (E in most models) · R queries without
padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightningrl.models.base import PLAIN, Style

BLOCK = 64
"""Queries per block; the fastest of 32, 64, 128 and 256 in benchmarks/forest.py."""
BATCH = 1 << 16
"""Scores per head and batch: 1 MB with four heads, which stays in the CPU's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Blocks that are computed together, padded to the longest. Rows index `[N·heads E]`, sorted by head."""

    shape: tuple[int, int, int]
    """B, Q, T"""
    queries: Tensor
    """[B·H·Q] row of each query; padding repeats a block's first query."""
    keys: Tensor
    """[B·K·T] row of the key at each depth; padding repeats the path's root."""
    open: int
    """Every query attends to all keys at a lower index."""
    bias: Tensor
    """[B 1 1 Q T-open] 0 where the query attends to the key, else -inf."""
    real: Tensor
    """[R] indices into `queries` that are not padding."""
    real_queries: Tensor
    """[R] the rows of those queries."""


class ForestAttention:
    """An `Attend` for `Decoder.hidden`, from a `Forest`'s `starts` [S+1], `parents` [S] and `positions` [N]."""

    def __init__(
        self,
        starts: np.ndarray,
        parents: np.ndarray,
        positions: np.ndarray,
        *,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._segments = (starts, parents, positions)
        self._heads = (heads, kv_heads)
        self._dtype, self._device = dtype, device
        self._batches: dict[int | None, list[Batch]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
        """q [N H E], k [N K E] and v [N K F] → attention output [N H F], with gradient, also of `style.sinks`."""
        out: Any = _Attention.apply(q, k, v, style.sinks, self.batches(style.window), style)
        return out

    def batches(self, window: int | None = None) -> list[Batch]:
        """The batches of a layer whose tokens attend to at most `window` tokens. None: to all."""
        starts, parents, positions = self._segments
        if window is not None and window > positions.max(initial=0):
            window = None  # as long as every path
        if window not in self._batches:
            heads, kv_heads = self._heads
            blocks = _blocks(starts, parents)
            if window is not None:
                blocks = [_within(block, positions, window) for block in blocks]
            self._batches[window] = [
                _batch(
                    together,
                    positions,
                    window=window,
                    heads=heads,
                    kv_heads=kv_heads,
                    dtype=self._dtype,
                    device=self._device,
                )
                for together in _batches(blocks)
            ]
        return self._batches[window]


class _Attention(torch.autograd.Function):
    """Forward O = P V with P = softmax(S), S = Q Kᵀ, Q = q / √E (arXiv 1706.03762, eq. 1).

    Backward (arXiv 2205.14135, appendix B.2): dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O)), dQ = dS K, dK = dSᵀ Q.
    A soft cap c makes S = c·tanh(Z / c) of the scores Z = Q Kᵀ, so that dZ = dS ⊙ (1 - (S / c)²). A sink b has the
    probability P_b in the same softmax but no value, so that db = -Σ P_b rowsum(dO ⊙ O).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, batches: list[Batch], style: Style
    ) -> Tensor:
        F = v.shape[2]
        q = q * _scale(q, style)
        out = q.new_empty(*q.shape[:2], F)
        q_rows, k_rows, v_rows, out_rows = (_rows(x) for x in (q, k, v, out))
        for batch in batches:
            Q, K, V = _queries(q_rows, batch, k.shape[1]), _keys(k_rows, batch), _keys(v_rows, batch)
            P, _, _ = _probabilities(Q, K, batch, sinks, style.softcap)
            out_rows.index_copy_(0, batch.real_queries, _without_padding(torch.bmm(P, V).view(-1, F), batch))
        ctx.save_for_backward(q, k, v, out, sinks)
        ctx.batches, ctx.style = batches, style
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, sinks = ctx.saved_tensors
        E, F, kv_heads, dout = q.shape[2], v.shape[2], k.shape[1], grads[0].contiguous()
        dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        q_rows, k_rows, v_rows, dq_rows, dk_rows, dv_rows, dout_rows = (_rows(x) for x in (q, k, v, dq, dk, dv, dout))
        delta = (dout * out).sum(-1).view(-1, 1)
        for batch in ctx.batches:
            Q, K, V = _queries(q_rows, batch, kv_heads), _keys(k_rows, batch), _keys(v_rows, batch)
            dO, D = (_with_padding(x, batch).view(*Q.shape[:2], -1) for x in (dout_rows, delta))
            P, slope, sunk = _probabilities(Q, K, batch, sinks, ctx.style.softcap)
            dv_rows.index_add_(0, batch.keys, torch.bmm(P.transpose(1, 2), dO).view(-1, F))
            dS = torch.bmm(dO, V.transpose(1, 2)).sub_(D).mul_(P)
            if slope is not None:
                dS.mul_(slope)
            if dsinks is not None and sunk is not None:
                dsinks.sub_((sunk * D).view(batch.shape[0], len(dsinks), -1).sum((0, 2)).to(dsinks.dtype))
            dk_rows.index_add_(0, batch.keys, torch.bmm(dS.transpose(1, 2), Q).view(-1, E))
            dq_rows.index_copy_(0, batch.real_queries, _without_padding(torch.bmm(dS, K).view(-1, E), batch))
        return dq.mul_(_scale(q, ctx.style)), dk, dv, dsinks, None, None


def _scale(q: Tensor, style: Style) -> float:
    return q.shape[2] ** -0.5 if style.scale is None else style.scale


def _rows(x: Tensor) -> Tensor:
    """[N heads E] → [N·heads E]"""
    return x.reshape(-1, x.shape[2])


def _queries(rows: Tensor, batch: Batch, kv_heads: int) -> Tensor:
    """The padded queries of a batch [B·K G·Q E]."""
    return rows.index_select(0, batch.queries).view(batch.shape[0] * kv_heads, -1, rows.shape[1])


def _keys(rows: Tensor, batch: Batch) -> Tensor:
    """The padded keys or values of a batch [B·K T E]."""
    return rows.index_select(0, batch.keys).view(-1, batch.shape[2], rows.shape[1])


def _probabilities(
    Q: Tensor, K: Tensor, batch: Batch, sinks: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """P of a batch [B·K G·Q T]; dS/dZ [B·K G·Q T] of a soft cap, or None; P of the sinks [B·K G·Q 1], or None."""
    B, queries, T = batch.shape
    S, slope = torch.bmm(Q, K.transpose(1, 2)), None
    if softcap is not None:
        tanh = S.div_(softcap).tanh_()
        S, slope = tanh * softcap, 1 - tanh.square()
    S.view(B, S.shape[0] // B, -1, queries, T)[..., batch.open :].add_(batch.bias)
    if sinks is None:
        return torch.softmax(S, dim=-1), slope, None
    sink = sinks.to(S.dtype).view(1, -1, 1).expand(B, len(sinks), queries).reshape(*S.shape[:2], 1)
    P = torch.softmax(torch.cat((S, sink), dim=-1), dim=-1)
    return P[..., :-1], slope, P[..., -1:]


def _without_padding(rows: Tensor, batch: Batch) -> Tensor:
    """[B·H·Q ..] → [R ..]"""
    return rows if len(batch.real) == len(rows) else rows.index_select(0, batch.real)


def _with_padding(rows: Tensor, batch: Batch) -> Tensor:
    """[N·H ..] → [B·H·Q ..]. Padding gets zeros, so that it adds nothing to the gradient of a key."""
    real = rows.index_select(0, batch.real_queries)
    if len(batch.real) == len(batch.queries):
        return real
    return rows.new_zeros(len(batch.queries), rows.shape[1]).index_copy_(0, batch.real, real)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    queries: np.ndarray
    keys: np.ndarray
    first: int = 0
    """Depth of the first key."""


def _blocks(starts: np.ndarray, parents: np.ndarray) -> list[_Block]:
    """Cut every segment into blocks of queries, each with the path (token indices) from its root to its last query."""
    paths: list[np.ndarray] = []
    blocks: list[_Block] = []
    for s, parent in enumerate(parents):
        own = np.arange(starts[s], starts[s + 1])
        above = paths[parent] if parent >= 0 else own[:0]
        paths.append(np.concatenate((above, own)))
        for first in range(0, len(own), BLOCK):
            last = min(first + BLOCK, len(own))
            blocks.append(_Block(queries=own[first:last], keys=paths[s][: len(above) + last]))
    return blocks


def _within(block: _Block, positions: np.ndarray, window: int) -> _Block:
    """A block with only the keys that one of its queries reaches in a window."""
    first = max(0, int(positions[block.queries[0]]) - window + 1)
    return _Block(queries=block.queries, keys=block.keys[first:], first=first)


def _batches(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Sort blocks by size and group them into batches that are small and have little padding."""
    batches: list[list[_Block]] = []
    Q = T = area = 0
    for block in sorted(blocks, key=lambda b: (-((len(b.queries) + 7) // 8), -len(b.keys))):
        q, t = len(block.queries), len(block.keys)
        if batches:
            padded = max(Q, q) * max(T, t) * (len(batches[-1]) + 1)
            if padded <= BATCH and padded <= 1.25 * (area + q * t):
                batches[-1].append(block)
                Q, T, area = max(Q, q), max(T, t), area + q * t
                continue
        batches.append([block])
        Q, T, area = q, t, q * t
    return batches


def _batch(
    blocks: list[_Block],
    positions: np.ndarray,
    *,
    window: int | None,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Batch:
    B, Q, T = len(blocks), max(len(b.queries) for b in blocks), max(len(b.keys) for b in blocks)
    queries, keys, real = np.zeros((B, Q), np.int64), np.zeros((B, T), np.int64), np.zeros((B, Q), bool)
    for b, block in enumerate(blocks):
        q, t = len(block.queries), len(block.keys)
        queries[b], keys[b] = block.queries[0], block.keys[0]
        queries[b, :q], keys[b, :t], real[b, :q] = block.queries, block.keys, True
    depth = positions[queries]
    first = int(depth.min()) + 1 if window is None else 0
    place = np.arange(first, T) + np.array([block.first for block in blocks])[:, None, None]  # depth of each key
    allowed = place <= depth[:, :, None]
    if window is not None:
        allowed &= place > depth[:, :, None] - window
    future = torch.from_numpy(~allowed).to(device)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(future, float("-inf"))
    q_rows = (queries[:, None, :] * heads + np.arange(heads)[:, None]).reshape(-1)
    k_rows = (keys[:, None, :] * kv_heads + np.arange(kv_heads)[:, None]).reshape(-1)
    real_rows = np.flatnonzero(np.broadcast_to(real[:, None, :], (B, heads, Q)))
    return Batch(
        shape=(B, Q, T),
        queries=torch.from_numpy(q_rows).to(device),
        keys=torch.from_numpy(k_rows).to(device),
        open=first,
        bias=bias[:, None, None],
        real=torch.from_numpy(real_rows).to(device),
        real_queries=torch.from_numpy(q_rows[real_rows]).to(device),
    )
