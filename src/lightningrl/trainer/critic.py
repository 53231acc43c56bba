"""The critic: a linear value head on the hidden state of the last prompt token of each call.

    loss = Σ_k W_k (V_k - R_k)²         V_k: value, R_k: return, W_k: sum of the weights of the call's tokens, so that
                                        a call counts as much here as in the policy's loss

The head begins at zero and shares the trunk with the policy. Its gradient, scaled by `value_coef`, goes into the trunk
(arXiv 1707.06347, eq. 9): hidden states that were trained only to predict tokens need not tell good states from bad
ones. The head's own gradient is clipped separately, so that a large error of the critic does not shorten the policy's
step. The head is not published.

Legend: K calls · M sampled tokens · N tokens · D hidden size.
"""

import numpy as np
import torch
from torch import Tensor, nn

from lightningrl.data.forest import Forest
from lightningrl.models.base import Decoder
from lightningrl.trainer.metrics import explained_variance


def value_head(model: Decoder) -> nn.Linear:
    """A linear layer D → 1, all zero, in float32 or wider, on the model's device."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    head = nn.Linear(model.hidden_size, 1, dtype=dtype, device=model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def values_of(head: nn.Linear, hidden: Tensor, forest: Forest) -> Tensor:
    """Hidden states [N D] → value of each call [K]."""
    states = torch.from_numpy(forest.states).long().to(hidden.device)
    return head(hidden.index_select(0, states).to(head.weight.dtype))[:, 0]


def value_loss(values: Tensor, returns: Tensor, forest: Forest) -> Tensor:
    """Σ_k W_k (V_k - R_k)² of values V [K] and returns R [K]."""
    per_call = np.bincount(forest.calls, weights=forest.weights, minlength=len(forest.call_ids))
    return (torch.from_numpy(per_call).to(values) * (values - returns).square()).sum()


def critic_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """Moments over the calls, which `metrics.merged` can merge over forests, and the explained variance."""
    error = values.detach() - returns
    moments = {
        "critic/loss": float(error.square().mean()),
        "critic/bias": float(error.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/return_square": float(returns.square().mean()),
        "critic/calls": float(len(returns)),
    }
    return moments | {"critic/explained_variance": explained_variance(moments)}
