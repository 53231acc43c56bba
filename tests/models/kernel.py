"""A slow emulation of torch's flash-attention kernel. Importing this module makes torch's operators run it on CPUs,
whose builds of torch have no such kernel.

It is written from the documentation of the kernel: causal, aligned bottom right, a window as the numbers of keys to the
left and to the right of a query's own position, key/value heads shared by consecutive query heads.
"""

from collections.abc import Iterator

import torch
import torch.nn.attention.varlen  # defines the operators
from torch import Tensor


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """query [N H E], key and value [T K E] → output [N H E], log of the softmax's denominators [H N], and no state."""
    assert scale is not None
    out = torch.full_like(query, torch.nan)
    logs = query.new_full((query.shape[1], len(query)), torch.nan, dtype=_wide(query))
    for mine, read in _sequences(query, key, cu_seq_q, cu_seq_k, max_q, max_k):
        Q, K, V = _heads(query[mine]), _shared(key[read], query), _shared(value[read], query)
        scores = _scores(Q, K, scale, is_causal=is_causal, window_size=window_size)
        out[mine] = (torch.softmax(scores, dim=-1) @ V).transpose(0, 1).to(out.dtype)
        logs[:, mine] = torch.logsumexp(scores, dim=-1)
    return out, logs, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the formulas of arXiv 2205.14135, appendix B.2."""
    assert torch.get_deterministic_debug_mode() == 2, "the kernel's sums would come in any order"
    assert scale is not None
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    groups = key.shape[1], query.shape[1] // key.shape[1]
    for mine, read in _sequences(query, key, cu_seq_q, cu_seq_k, max_q, max_k):
        Q, K, V = _heads(query[mine]), _shared(key[read], query), _shared(value[read], query)
        dO, O = _heads(grad_out[mine]), _heads(out[mine])  # noqa: E741 - the paper's symbol
        S = _scores(Q, K, scale, is_causal=is_causal, window_size=window_size)
        P = torch.exp(S - lse[:, mine, None])
        dS = scale * P * (dO @ V.transpose(1, 2) - (dO * O).sum(-1, keepdim=True))
        dq[mine] = (dS @ K).transpose(0, 1).to(dq.dtype)
        dk[read] = (dS.transpose(1, 2) @ Q).unflatten(0, groups).sum(1).transpose(0, 1).to(dk.dtype)
        dv[read] = (P.transpose(1, 2) @ dO).unflatten(0, groups).sum(1).transpose(0, 1).to(dv.dtype)
    return dq, dk, dv


def _sequences(
    query: Tensor, key: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice]]:
    """The queries and keys of each sequence."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    q_ends, k_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (q_ends[0], q_ends[-1], k_ends[0], k_ends[-1]) == (0, len(query), 0, len(key))
    for b in range(len(q_ends) - 1):
        assert 0 < q_ends[b + 1] - q_ends[b] <= max_q
        assert 0 < k_ends[b + 1] - k_ends[b] <= max_k
        yield slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])


def _hidden(queries: int, keys: int, *, is_causal: bool, window_size: list[int] | None) -> Tensor:
    """The mask [queries keys] of what a query does not read."""
    left, right = window_size or [-1, -1]
    right = 0 if is_causal else right
    own, number = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    if left >= 0:
        mask |= number < own - left
    if right >= 0:
        mask |= number > own + right
    return mask


def _scores(Q: Tensor, K: Tensor, scale: float, *, is_causal: bool, window_size: list[int] | None) -> Tensor:
    hidden = _hidden(Q.shape[1], K.shape[1], is_causal=is_causal, window_size=window_size)
    return (scale * Q @ K.transpose(1, 2)).masked_fill(hidden, -torch.inf)


def _wide(x: Tensor) -> torch.dtype:
    """What the kernel computes in: float32, or here float64."""
    return torch.promote_types(x.dtype, torch.float32)


def _heads(x: Tensor) -> Tensor:
    """[n heads E] → [heads n E]"""
    return x.transpose(0, 1).to(_wide(x))


def _shared(x: Tensor, query: Tensor) -> Tensor:
    """[n K E] → [H n E]"""
    return _heads(x.repeat_interleave(query.shape[1] // x.shape[1], 1))


torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward)
torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward)
