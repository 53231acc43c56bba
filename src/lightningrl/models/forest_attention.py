"""Attention over a forest: every token attends to its ancestors and itself, without computing shared prefixes twice.

The queries of a segment are cut into blocks. Blocks of similar size are padded together into batches that fit in the
CPU's cache. Keys are ordered by depth, so one comparison makes the mask: a query at position p attends to the keys 0..p
of its own path. The backward pass computes scores again, which is cheaper than storing them.

Legend: N tokens · S segments · B blocks of a batch · Q padded queries · T padded keys · H query heads · K key/value
heads · G = H / K query heads per key/value head · E head size · R queries without padding.
"""

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
        self.batches = [
            _batch(blocks, positions, heads=heads, kv_heads=kv_heads, dtype=dtype, device=device)
            for blocks in _batches(_blocks(starts, parents))
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
        """q [N H E], k and v [N K E] → attention output [N H E], with gradient."""
        out: Any = _Attention.apply(q, k, v, self.batches)
        return out


class _Attention(torch.autograd.Function):
    """Forward O = P V with P = softmax(S), S = Q Kᵀ, Q = q / √E (arXiv 1706.03762, eq. 1).

    Backward (arXiv 2205.14135, appendix B.2): dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O)), dQ = dS K, dK = dSᵀ Q.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, batches: list[Batch]) -> Tensor:
        E = q.shape[2]
        q = q * E**-0.5
        out = torch.empty_like(q)
        q_rows, k_rows, v_rows, out_rows = (_rows(x) for x in (q, k, v, out))
        for batch in batches:
            Q, K, V = _queries(q_rows, batch, k.shape[1]), _keys(k_rows, batch), _keys(v_rows, batch)
            attended = torch.bmm(_probabilities(Q, K, batch), V).view(-1, E)
            out_rows.index_copy_(0, batch.real_queries, _without_padding(attended, batch))
        ctx.save_for_backward(q, k, v, out)
        ctx.batches = batches
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        E, kv_heads, dout = q.shape[2], k.shape[1], grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
        q_rows, k_rows, v_rows, dq_rows, dk_rows, dv_rows, dout_rows = (_rows(x) for x in (q, k, v, dq, dk, dv, dout))
        delta = (dout * out).sum(-1).view(-1, 1)
        for batch in ctx.batches:
            Q, K, V = _queries(q_rows, batch, kv_heads), _keys(k_rows, batch), _keys(v_rows, batch)
            dO, D = (_with_padding(x, batch).view(*Q.shape[:2], -1) for x in (dout_rows, delta))
            P = _probabilities(Q, K, batch)
            dv_rows.index_add_(0, batch.keys, torch.bmm(P.transpose(1, 2), dO).view(-1, E))
            dS = torch.bmm(dO, V.transpose(1, 2)).sub_(D).mul_(P)
            dk_rows.index_add_(0, batch.keys, torch.bmm(dS.transpose(1, 2), Q).view(-1, E))
            dq_rows.index_copy_(0, batch.real_queries, _without_padding(torch.bmm(dS, K).view(-1, E), batch))
        return dq.mul_(E**-0.5), dk, dv, None


def _rows(x: Tensor) -> Tensor:
    """[N heads E] → [N·heads E]"""
    return x.reshape(-1, x.shape[2])


def _queries(rows: Tensor, batch: Batch, kv_heads: int) -> Tensor:
    """The padded queries of a batch [B·K G·Q E]."""
    return rows.index_select(0, batch.queries).view(batch.shape[0] * kv_heads, -1, rows.shape[1])


def _keys(rows: Tensor, batch: Batch) -> Tensor:
    """The padded keys or values of a batch [B·K T E]."""
    return rows.index_select(0, batch.keys).view(-1, batch.shape[2], rows.shape[1])


def _probabilities(Q: Tensor, K: Tensor, batch: Batch) -> Tensor:
    """P of a batch [B·K G·Q T]."""
    B, queries, T = batch.shape
    S = torch.bmm(Q, K.transpose(1, 2))
    S.view(B, S.shape[0] // B, -1, queries, T)[..., batch.open :].add_(batch.bias)
    return torch.softmax(S, dim=-1)


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


def _batches(blocks: list[_Block]) -> list[list[_Block]]:
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
    first = int(depth.min()) + 1
    allowed = np.arange(first, T) <= depth[:, :, None]
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
