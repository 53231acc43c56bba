"""What does the policy expect of a call before it makes it? A linear value head on the hidden state of the last token
of the prompt.

    loss = Σ_k W_k (V_k - R_k)²         W_k: the weights of the call's tokens, added up, so that a call counts here as
    it does in the policy

The head begins at zero. It shares the trunk with the policy, and its gradient goes into the trunk, scaled by
`value_coef` like the loss itself (arXiv 1707.06347, eq. 9): hidden states that were only ever trained to predict tokens
need not tell a good state from a bad one. Its own gradient is clipped by itself, so that a large error of the critic
does not shorten the policy's step. It is no part of what is published.

Legend: K calls · M sampled tokens · N tokens · D hidden size.
"""

import numpy as np
import torch
from torch import Tensor, nn

from lightningrl.data.forest import Forest
from lightningrl.models.dense import DenseModel
from lightningrl.trainer.metrics import explained_variance


def value_head(model: DenseModel) -> nn.Linear:
    """D → 1, all zero, in float32 or wider."""
    head = nn.Linear(model.hf.config.hidden_size, 1, dtype=torch.promote_types(model.dtype, torch.float32))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def values_of(head: nn.Linear, hidden: Tensor, forest: Forest) -> Tensor:
    """Hidden states [N D] → [K]"""
    return head(hidden.index_select(0, torch.from_numpy(forest.states).long()).to(head.weight.dtype))[:, 0]


def value_loss(values: Tensor, returns: Tensor, forest: Forest) -> Tensor:
    """[K], [K] → a number"""
    per_call = np.bincount(forest.calls, weights=forest.weights, minlength=len(forest.call_ids))
    return (torch.from_numpy(per_call).to(values.dtype) * (values - returns).square()).sum()


def critic_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Moments over the calls, so that those of several forests can be merged, and what follows from them."""
    error = values.detach() - returns
    moments = {
        "critic/loss": float(error.square().mean()),
        "critic/bias": float(error.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/return_square": float(returns.square().mean()),
        "critic/calls": float(len(returns)),
    }
    return moments | {"critic/explained_variance": explained_variance(moments)}
