"""Importance sampling: truncated or masked ratios that correct for tokens sampled by other weights.

    u = min(π(y) / π_behaviour(y), C)                           truncated: small bias, bounded variance (Ionides 2008)
    u = π(y) / π_behaviour(y) where that is at most C, else 0   masked: larger ratios teach nothing

π_behaviour: the recorded log-probabilities; C: `importance_cap`. y is a token, or all tokens sampled in a call or
rollout, whose ratio is the product over its tokens. With C = 2 this corrects the gap between inference engine and
trainer: fengyao.notion.site/off-policy-rl (tokens), verl.readthedocs.io/en/latest/algo/rollout_corr.html and
richardli.xyz/rl-collapse (sequences, masks). u multiplies the loss of the advantage and has no gradient. KL, entropy
and critic are not weighted.

Legend: M sampled tokens.
"""

import math

import torch
from torch import Tensor

from lightningrl.config import LossConfig
from lightningrl.data.forest import Forest
from lightningrl.trainer.sequences import Level, sequences_of, sum_over

LEVELS: dict[str, Level] = {"token": "token", "call": "call", "rollout": "rollout"}


@torch.no_grad()
def importance_weights(target: Tensor, behaviour: Tensor, forest: Forest, config: LossConfig) -> tuple[Tensor, Tensor]:
    """(u [M], whether each token's ratio exceeds the cap [M]) of logprobs [M] under π (`target`) and π_behaviour."""
    level, _, mask = config.importance.partition("-")
    sequences = sequences_of(forest, LEVELS[level], device=target.device)
    delta = target - behaviour if sequences is None else sum_over(target - behaviour, sequences)
    exceeds = delta > math.log(config.importance_cap)
    u = torch.exp(
        delta.clamp(max=math.log(config.importance_cap))
    )  # clamped first: the ratio of a long rollout may overflow
    return (torch.where(exceeds, 0.0, u) if mask else u), exceeds
