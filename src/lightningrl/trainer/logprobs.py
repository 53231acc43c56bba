"""How likely is each sampled token under the current weights? Logits only for the rows that are asked for, each row once.

Legend: N tokens · D hidden size · R unique rows, a pair of source token and temperature · M sampled tokens · V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightningrl.data.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Terms sorted by the row of logits they read."""

    sources: Tensor
    """[R] index into the forest's tokens."""
    temperatures: Tensor
    """[R 1]"""
    of_term: Tensor
    """[M] the row of each term."""
    targets: Tensor
    """[M] token ids."""


def unique_rows(forest: Forest, *, dtype: torch.dtype) -> Rows:
    """The rows of logits that the terms of a forest read."""
    pairs = np.stack((forest.sources.astype(np.float64), forest.temperatures))
    unique, of_term = np.unique(pairs, axis=1, return_inverse=True)
    return Rows(
        sources=torch.from_numpy(unique[0].astype(np.int64)),
        temperatures=torch.from_numpy(unique[1][:, None]).to(dtype),
        of_term=torch.from_numpy(of_term.reshape(-1).astype(np.int64)),
        targets=torch.from_numpy(forest.targets.astype(np.int64)),
    )


def term_logprobs(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Logits [R V] → logprob of each term [M], with gradient, and the entropy of each row [R], without."""
    out: Any = _TermLogprobs.apply(logits, rows)
    return out


class _TermLogprobs(torch.autograd.Function):
    """log p(target) = z - logsumexp(z), z = logits / temperature; d log p / d logits = (onehot - p) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp = torch.log_softmax(logits.to(wide) / rows.temperatures, dim=-1)
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        terms = logp[rows.of_term, rows.targets]
        ctx.save_for_backward(p)
        ctx.rows, ctx.dtype = rows, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return terms, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (p,) = ctx.saved_tensors
        rows, d_terms = ctx.rows, grads[0]
        per_row = torch.zeros(len(rows.sources), dtype=p.dtype).index_add_(0, rows.of_term, d_terms)
        d_logits = p * -per_row[:, None]
        d_logits.index_put_((rows.of_term, rows.targets), d_terms, accumulate=True)
        return (d_logits / rows.temperatures).to(ctx.dtype), None
