"""What does the model say of a forest? Hidden states of unique tokens → logprobs and entropies of sampled tokens,
values of calls.

Legend: M sampled tokens · K calls.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightningrl.data.forest import Forest
from lightningrl.models.dense import DenseModel
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.trainer.critic import values_of
from lightningrl.trainer.logprobs import term_logprobs, unique_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """All with gradient, unless nobody asked for it."""

    logprobs: Tensor
    """[M] of each sampled token, at its temperature."""
    entropies: Tensor
    """[M] of the distribution that each token was drawn from."""
    values: Tensor | None
    """[K] None without a critic."""


def forward(
    model: DenseModel, forest: Forest, *, critic: nn.Linear | None = None, entropy_gradient: bool = False
) -> Outputs:
    """Run the model once over the unique tokens. Entropy is always told; its gradient costs something and is there only
    on demand.
    """
    attend = ForestAttention(
        forest.starts, forest.parents, forest.positions, heads=model.heads, kv_heads=model.kv_heads, dtype=model.dtype
    )
    hidden = model.hidden(torch.from_numpy(forest.token_ids), torch.from_numpy(forest.positions), attend)
    rows = unique_rows(forest, dtype=torch.promote_types(model.dtype, torch.float32))
    logits = model.logits(hidden.index_select(0, rows.sources))
    logprobs, entropies = term_logprobs(logits, rows, entropy_gradient=entropy_gradient)
    values = values_of(critic, hidden, forest) if critic is not None else None
    return Outputs(logprobs=logprobs, entropies=entropies.index_select(0, rows.of_term), values=values)
