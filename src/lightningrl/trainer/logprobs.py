"""Log-probabilities and entropies of sampled tokens. Each needed row of logits is computed once.

Legend: R unique rows, a row being a pair of source token and temperature · M sampled tokens · V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightningrl.data.forest import Forest

ROWS = 128
"""Rows of logits per chunk: with a vocabulary of 1,300 tokens a chunk stays in the CPU's cache."""


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
        wide = torch.promote_types(logits.dtype, torch.float32)
        lse, entropy = logits.new_empty(len(logits), 1, dtype=wide), logits.new_empty(len(logits), dtype=wide)
        for chunk in _chunks(logits):
            z = logits[chunk].to(wide) / rows.temperatures[chunk]
            lse[chunk] = torch.logsumexp(z, dim=-1, keepdim=True)
            logp = z.sub_(lse[chunk])
            entropy[chunk] = -(logp.exp().mul_(logp)).sum(-1)
        targeted = logits[rows.of_term, rows.targets].to(wide) / rows.temperatures[rows.of_term, 0]
        ctx.save_for_backward(logits, lse, entropy)
        ctx.rows, ctx.entropy_gradient = rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return targeted - lse[rows.of_term, 0], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, lse, entropy = ctx.saved_tensors
        rows = ctx.rows
        d_terms = grads[0] / rows.temperatures[rows.of_term, 0]
        per_row = torch.zeros_like(lse).index_add_(0, rows.of_term, d_terms[:, None]).neg_()
        d_logits = torch.empty_like(logits)
        for chunk in _chunks(logits):
            logp = (logits[chunk].to(lse.dtype) / rows.temperatures[chunk]).sub_(lse[chunk])
            if ctx.entropy_gradient:
                d_entropy = grads[1][chunk, None] / rows.temperatures[chunk]
                d_logits[chunk] = logp.exp() * (per_row[chunk] - d_entropy * (logp + entropy[chunk, None]))
            else:
                d_logits[chunk] = logp.exp_().mul_(per_row[chunk])
        return d_logits.index_put_((rows.of_term, rows.targets), d_terms.to(logits.dtype), accumulate=True), None, None


def _chunks(logits: Tensor) -> list[slice]:
    return [slice(first, first + ROWS) for first in range(0, len(logits), ROWS)]
