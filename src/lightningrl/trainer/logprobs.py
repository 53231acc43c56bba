"""Log-probabilities and entropies of sampled tokens. Each needed row of logits is computed once.

All logits of a batch may be far larger than the model: 65,536 rows of 151,936 words take 40 GB in float32. So a large
batch is computed in chunks of rows, and the backward pass computes the logits of a chunk again.

Legend: R unique rows, a row being a pair of source token and temperature · M sampled tokens · V vocabulary · D hidden
size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightningrl.data.forest import Forest

ROWS = 128
"""Rows of logits whose softmax is computed together: with a vocabulary of 1,300 tokens they stay in the CPU's cache."""
CHUNK = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Most logits that exist at once, by type of device: 220 rows of 151,936 words on a CPU, 883 on a GPU. On two cores,
960 such rows took 18 s of CPU time in one chunk of 960, 21 s in chunks of 256 and 29 s in chunks of 64 rows.
"""

Logits: TypeAlias = Callable[[Tensor], Tensor]
"""Hidden states [.. D] → logits [.. V], each row for itself (`Decoder.logits`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of logits that the sampled tokens of a forest read."""

    sources: Tensor
    """[R] index of the source token in the forest."""
    temperatures: Tensor
    """[R 1]"""
    of_term: Tensor
    """[M] the row that each sampled token reads."""
    targets: Tensor
    """[M] ids of the sampled tokens."""

    def parts(self, size: int) -> Iterator[tuple[slice, Tensor, "Rows"]]:
        """Chunks of at most `size` rows: the rows, the indices of the terms that read them, and both as `Rows`."""
        firsts = range(0, len(self.sources), size)
        in_order, order = torch.sort(self.of_term, stable=True)
        begins = torch.searchsorted(in_order, torch.arange(0, len(self.sources), size, device=order.device)).tolist()
        for first, begin, end in zip(firsts, begins, [*begins[1:], len(order)], strict=True):
            terms, rows = order[begin:end], slice(first, first + size)
            yield (
                rows,
                terms,
                Rows(
                    sources=self.sources[rows],
                    temperatures=self.temperatures[rows],
                    of_term=self.of_term[terms] - first,
                    targets=self.targets[terms],
                ),
            )


def unique_rows(forest: Forest, *, dtype: torch.dtype, device: torch.device) -> Rows:
    """The rows of logits that a forest needs, on `device`; temperatures in `dtype`."""
    pairs = np.stack((forest.sources.astype(np.float64), forest.temperatures))
    unique, of_term = np.unique(pairs, axis=1, return_inverse=True)
    return Rows(
        sources=torch.from_numpy(unique[0].astype(np.int64)).to(device),
        temperatures=torch.from_numpy(unique[1][:, None]).to(device, dtype),
        of_term=torch.from_numpy(of_term.reshape(-1).astype(np.int64)).to(device),
        targets=torch.from_numpy(forest.targets.astype(np.int64)).to(device),
    )


def rows_at_once(vocab: int, *, device: torch.device) -> int:
    """Rows of logits in a chunk."""
    return max(CHUNK[device.type] // vocab, 1)


def head_logprobs(
    logits: Logits, hidden: Tensor, rows: Rows, *, size: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """The LM head and `term_logprobs` on the hidden states [R D] of `rows`, in chunks of at most `size` rows. A single
    chunk keeps its logits for the backward pass.
    """
    if len(hidden) <= size:
        return term_logprobs(logits(hidden), rows, entropy_gradient=entropy_gradient)
    out: Any = _HeadLogprobs.apply(hidden, logits, rows, size, entropy_gradient, *_leaves(logits, hidden))
    return out


def term_logprobs(logits: Tensor, rows: Rows, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Logits [R V] → log-probability of each sampled token [M] and entropy of each row [R], in nats.

    The entropy has a gradient only with `entropy_gradient`.
    """
    out: Any = _TermLogprobs.apply(logits, rows, entropy_gradient)
    return out


class _TermLogprobs(torch.autograd.Function):
    """log p(target) = z - logsumexp(z), with z = logits / temperature; H = -Σ p log p

    d log p(target) / dz = onehot(target) - p        dH / dz = -p (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        logprobs, lse, entropy = _values(logits, rows)
        ctx.save_for_backward(logits, lse, entropy)
        ctx.rows, ctx.entropy_gradient = rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, lse, entropy = ctx.saved_tensors
        d_entropy = grads[1] if ctx.entropy_gradient else None
        return _gradient(logits, ctx.rows, lse, entropy, grads[0], d_entropy), None, None


class _HeadLogprobs(torch.autograd.Function):
    """`_TermLogprobs` of the LM head's logits, chunk by chunk. `leaves`: the tensors that learn in the head. Their
    gradients are summed in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, logits: Logits, rows: Rows, size: int, entropy_gradient: bool, *leaves: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(rows.targets), dtype=wide)
        lse, entropy = hidden.new_empty(len(hidden), 1, dtype=wide), hidden.new_empty(len(hidden), dtype=wide)
        for chunk, terms, part in rows.parts(size):
            logprobs[terms], lse[chunk], entropy[chunk] = _values(logits(hidden[chunk]), part)
        ctx.save_for_backward(hidden, lse, entropy)
        ctx.logits, ctx.rows, ctx.size, ctx.entropy_gradient, ctx.leaves = logits, rows, size, entropy_gradient, leaves
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, lse, entropy = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_leaves: list[Tensor] = []
        for chunk, terms, part in ctx.rows.parts(ctx.size):
            d_entropy = grads[1][chunk] if ctx.entropy_gradient else None
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_()
                logits = ctx.logits(states)
            d_logits = _gradient(logits.detach(), part, lse[chunk], entropy[chunk], grads[0][terms], d_entropy)
            d_hidden[chunk], *d_parts = torch.autograd.grad(logits, (states, *ctx.leaves), d_logits)
            d_leaves = _added(d_leaves, d_parts, dtype=lse.dtype)
            del logits, d_logits, d_parts  # not one large tensor lives on beside those of the next chunk
        sums = [total.to(leaf.dtype) for total, leaf in zip(d_leaves, ctx.leaves, strict=True)]
        return d_hidden, None, None, None, None, *sums


def _added(totals: list[Tensor], parts: list[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """The totals after adding the parts in place; the parts themselves if there are no totals yet."""
    if not totals:
        return [part.to(dtype) for part in parts]
    return [total.add_(part) for total, part in zip(totals, parts, strict=True)]


def _values(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each term [M], logsumexp [R 1] and entropy [R] of each row of logits [R V]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    lse, entropy = logits.new_empty(len(logits), 1, dtype=wide), logits.new_empty(len(logits), dtype=wide)
    for few in _slices(logits):
        z = logits[few].to(wide) / rows.temperatures[few]
        lse[few] = torch.logsumexp(z, dim=-1, keepdim=True)
        logp = z.sub_(lse[few])
        entropy[few] = -(logp.exp().mul_(logp)).sum(-1)
    targeted = logits[rows.of_term, rows.targets].to(wide) / rows.temperatures[rows.of_term, 0]
    return targeted - lse[rows.of_term, 0], lse, entropy


def _gradient(
    logits: Tensor, rows: Rows, lse: Tensor, entropy: Tensor, d_logprobs: Tensor, d_entropy: Tensor | None
) -> Tensor:
    """[R V] gradient of the logits from those of log-probabilities [M] and entropies [R], if the latter have one."""
    d_terms = d_logprobs / rows.temperatures[rows.of_term, 0]
    per_row = torch.zeros_like(lse).index_add_(0, rows.of_term, d_terms[:, None]).neg_()
    d_logits = torch.empty_like(logits)
    for few in _slices(logits):
        logp = (logits[few].to(lse.dtype) / rows.temperatures[few]).sub_(lse[few])
        if d_entropy is None:
            d_logits[few] = logp.exp_().mul_(per_row[few])
        else:
            scaled = d_entropy[few, None] / rows.temperatures[few]
            d_logits[few] = logp.exp() * (per_row[few] - scaled * (logp + entropy[few, None]))
    return d_logits.index_put_((rows.of_term, rows.targets), d_terms.to(logits.dtype), accumulate=True)


def _slices(logits: Tensor) -> list[slice]:
    return [slice(first, first + ROWS) for first in range(0, len(logits), ROWS)]


def _leaves(logits: Logits, hidden: Tensor) -> list[Tensor]:
    """The tensors that learn in the LM head: those that autograd meets on its way back from a row of logits."""
    found: dict[int, Tensor] = {}
    nodes, seen = [logits(hidden[:1].detach()).grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that collects a leaf's gradient
        if leaf is not None:
            found[id(leaf)] = leaf
        nodes += [following for following, _ in node.next_functions]
    return list(found.values())
