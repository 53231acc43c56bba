"""Attention of new tokens over the cache. On the CPU a token's result is the same bit for bit, whatever else the pass
computes.

    O = softmax(q Kᵀ / √E) V        arXiv 1706.03762, eq. 1; grouped query heads: arXiv 2305.13245

Floating-point sums depend on the order of their terms, and libraries choose that order by shape. So every query token
has its own pair of products, `[G E] @ [E T]` and `[G T] @ [T E]`: decoded, prefilled alone, or prefilled with a hundred
others. The sum over T runs in blocks of fixed size. Measured with MKL on AVX-512 CPUs of Intel and AMD (torch 2.13,
float32, one thread):

- rows of `F.linear` keep their bits for any number of rows ≥ 16, but not below: passes are padded (`model_runner.PAD`);
- a product over T changed its bits between T = 512 and 4096 (only masked positions added), on AMD from T = 129; blocks
  of 128 never did: hence `SUM_BLOCK`;
- softmax keeps its bits when T grows by whole vectors of masked positions: hence `cache.BLOCK`.

tests/engine/test_invariance.py asserts it on the machine at hand.

On a GPU it does not hold: libraries choose among kernels by shape. There all tokens of a prompt are one large product,
and a sum over T is not cut into blocks. A token's bits then depend on the other tokens of the pass.

Legend: A decoded sequences · N new tokens of a prompt · H query heads · K key/value heads · G = H / K · E head size · T
cached tokens.
"""

import torch
from torch import Tensor

from lightningrl.models.base import PLAIN, Style

SUM_BLOCK = 128
SCORES = 1 << 25
"""Most scores of a prompt that exist at once on a GPU: 128 MB in float32. Not tuned."""


def causal_mask(positions: Tensor, length: int, *, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[N 1 T] 0 where a token at `positions` [N] may attend, -inf where it may not: the future, and what is before the
    last `window` tokens.
    """
    places = torch.arange(length, device=positions.device)
    hidden = places > positions[:, None, None]
    if window is not None:
        hidden |= places <= positions[:, None, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, style: Style = PLAIN) -> None:
    """Attention of one token of each of A sequences, each over its own row; the result goes into `out`.

    q and out [A H E], keys and values [A K T E], mask [A·K 1 T].
    """
    A, H, E = q.shape
    K, T = keys.shape[1:3]
    q, out = q.reshape(A * K, H // K, E), out.view(A * K, H // K, E)
    sinks = None if style.sinks is None else style.sinks.expand(A, H).reshape(A * K, H // K, 1)
    _attend(q, _flat(keys, A * K, T), _flat(values, A * K, T), mask, out, style, sinks)


def attend_prompt(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, style: Style = PLAIN) -> None:
    """Attention of N tokens of one sequence over one row; the result goes into `out`.

    q and out [N H E], keys and values [K T E], mask [N 1 T].
    """
    if q.device.type == "cpu":
        _token_by_token(q, keys, values, mask, out, style)
    else:
        together(q, keys, values, mask, out, style)


def together(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, style: Style = PLAIN) -> None:
    """`attend_prompt` with one product for all query heads of a key/value head, for as many tokens as fit `SCORES`."""
    H, E = q.shape[1:]
    K, T = keys.shape[:2]
    count = max(SCORES // (H * T), 1)
    for first in range(0, len(q), count):
        rows = slice(first, first + count)
        grouped = q[rows].view(-1, K, H // K, E).transpose(0, 1).reshape(K, -1, E)
        masks = mask[rows].expand(-1, H // K, T).reshape(1, -1, T)
        sinks = style.sinks
        if sinks is not None:
            sinks = sinks.view(K, 1, H // K).expand(K, grouped.shape[1] * K // H, H // K).reshape(K, -1, 1)
        attended = torch.bmm(_weights(grouped, keys, masks, style, sinks), values)
        out[rows] = attended.view(K, -1, H // K, E).transpose(0, 1).reshape(-1, H, E)


def _token_by_token(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, style: Style) -> None:
    N, H, E = q.shape
    K, T = keys.shape[:2]
    G = H // K
    part = out.new_empty(N, G, E)  # a batched product into a strided tensor would go matrix by matrix
    for head in range(K):  # an expanded view: the row is not copied for each token
        k, v = (x[head].unsqueeze(0).expand(N, T, E) for x in (keys, values))
        mine = slice(head * G, (head + 1) * G)
        _attend(q[:, mine], k, v, mask, part, style, None if style.sinks is None else style.sinks[mine, None])
        out[:, mine] = part


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, style: Style, sinks: Tensor | None
) -> None:
    """softmax(q Kᵀ / √E + mask) V into `out`. q and out [B G E], keys and values [B T E], mask [B 1 T]; `sinks`:
    [G 1] or [B G 1].
    """
    weights = _weights(q, keys, mask, style, sinks)
    block = SUM_BLOCK if out.device.type == "cpu" else values.shape[1]
    torch.bmm(weights[:, :, :block], values[:, :block], out=out)
    for start in range(block, values.shape[1], block):
        out.baddbmm_(weights[:, :, start : start + block], values[:, start : start + block])


def _weights(q: Tensor, keys: Tensor, mask: Tensor, style: Style, sinks: Tensor | None) -> Tensor:
    """The softmax [B G T] of one product of queries and keys, in any `Style`; its window is in the mask."""
    scale = q.shape[-1] ** -0.5 if style.scale is None else style.scale
    if style.softcap is None:
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(q, keys.transpose(1, 2)).mul_(scale / style.softcap).tanh_().mul_(style.softcap).add_(mask)
    if sinks is None:
        return torch.softmax(scores, dim=-1, out=scores)
    above = torch.exp(sinks - scores.amax(-1, keepdim=True))  # the sink's weight beside that of the largest score
    weights = torch.softmax(scores, dim=-1, out=scores)
    return weights.div_(1 + weights.amax(-1, keepdim=True) * above)


def _flat(rows: Tensor, count: int, length: int) -> Tensor:
    """[A K T E] → [A·K T E] without a copy, although rows are longer than T."""
    stride = rows.stride()
    return rows.as_strided((count, length, rows.shape[-1]), (stride[1], stride[2], stride[3]))
