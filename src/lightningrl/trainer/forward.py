"""One forward pass over a forest: logprobs and entropies of its sampled tokens, and values of its calls.

Legend: M sampled tokens · K calls.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightningrl.data.forest import Forest
from lightningrl.models.base import Decoder
from lightningrl.models.varlen_attention import forest_attention
from lightningrl.trainer.critic import values_of
from lightningrl.trainer.logprobs import head_logprobs, rows_at_once, unique_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The result of a forward pass. All fields have a gradient, unless it is disabled."""

    logprobs: Tensor
    """[M] log-probability in nats of each sampled token, at its temperature."""
    entropies: Tensor
    """[M] entropy in nats of the distribution that each token was sampled from."""
    values: Tensor | None
    """[K] the critic's value of each call; None without a critic."""


def forward(
    model: Decoder,
    forest: Forest,
    *,
    critic: nn.Linear | None = None,
    entropy_gradient: bool = False,
    checkpointing: bool = False,
) -> Outputs:
    """Run the model once over the unique tokens. The entropy's gradient costs time, so it is computed on demand.
    `checkpointing` as in `Decoder.hidden`.
    """
    attend = forest_attention(forest.starts, forest.parents, forest.positions, model=model)
    token_ids, positions = (torch.from_numpy(x).to(model.device) for x in (forest.token_ids, forest.positions))
    hidden = model.hidden(token_ids, positions, attend, checkpointing=checkpointing)
    rows = unique_rows(forest, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    states = hidden.index_select(0, rows.sources)
    size = rows_at_once(model.vocab_size, device=model.device)
    logprobs, entropies = head_logprobs(model.logits, states, rows, size=size, entropy_gradient=entropy_gradient)
    values = values_of(critic, hidden, forest) if critic is not None else None
    return Outputs(logprobs=logprobs, entropies=entropies.index_select(0, rows.of_term), values=values)
