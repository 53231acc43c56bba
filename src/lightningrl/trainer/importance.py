"""How much does a token count that other weights sampled than it is learnt by? Truncated or masked importance weights.

    u = min(π(y) / π_behaviour(y), C)         truncated: a little biased, of bounded variance (Ionides 2008)
    u = π(y) / π_behaviour(y) where that is at most C, else 0         masked: what is too unlikely to be true teaches
    nothing

π_behaviour are the recorded logprobs. y is a token, or all that was sampled in a call or rollout: there the ratio is
the product over its tokens. That is what the field does with the gap between an inference engine and a trainer, with C
= 2: fengyao.notion.site/off-policy-rl (tokens), verl.readthedocs.io/en/latest/algo/rollout_corr.html and
richardli.xyz/rl-collapse (sequences, masks). u multiplies the loss of the advantage and has no gradient; it does not
touch KL, entropy and critic.

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
    """Logprobs [M] under the weights that are meant and under those that sampled → (u [M], which tokens exceed the cap
    [M]).
    """
    level, _, mask = config.importance.partition("-")
    sequences = sequences_of(forest, LEVELS[level])
    delta = target - behaviour if sequences is None else sum_over(target - behaviour, sequences)
    exceeds = delta > math.log(config.importance_cap)
    u = torch.exp(
        delta.clamp(max=math.log(config.importance_cap))
    )  # clamped first: the ratio of a long rollout may be anything
    return (torch.where(exceeds, 0.0, u) if mask else u), exceeds
