"""Policy-gradient losses of sampled tokens, as pure functions. `objective` weighs and sums them.

Legend: M sampled tokens · π current policy · A advantage · r probability ratio · ε_low, ε_high, c clip settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightningrl.config import LossConfig
from lightningrl.trainer.sequences import mean_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The input of a loss; every field is [M]."""

    logprobs: Tensor
    """log π(y_t) in nats, under the current weights; the only field with a gradient."""
    old_logprobs: Tensor
    """log π_old(y_t) in nats, under the weights that sampled the tokens, or those at the start of the batch."""
    advantages: Tensor
    sequences: Tensor | None = None
    """Number (from 0) of the call or rollout whose tokens share one ratio; None: every token has its own ratio."""


Clips: TypeAlias = Mapping[str, Tensor]
"""`low`, `high` or `dual` → whether each token was clipped [M]."""
Loss: TypeAlias = Callable[[Terms, LossConfig], tuple[Tensor, Clips]]
"""→ (loss of each token [M], clipped tokens)"""


def ratios(terms: Terms) -> Tensor:
    """[M] r_t = π(y_t) / π_old(y_t), or s = (π(y) / π_old(y))^(1/|y|) of the token's sequence y (arXiv 2507.18071,
    eq. 7). The gradient of s goes through every token of the sequence.
    """
    delta = terms.logprobs - terms.old_logprobs
    return torch.exp(delta if terms.sequences is None else mean_over(delta, terms.sequences))


def pg(terms: Terms, config: LossConfig) -> tuple[Tensor, Clips]:
    """-A · log π (REINFORCE). With A = 1 it is the negative log-likelihood of supervised learning."""
    never = torch.zeros_like(terms.logprobs, dtype=torch.bool)
    return -terms.advantages * terms.logprobs, {"low": never, "high": never}


def ppo_clip(terms: Terms, config: LossConfig) -> tuple[Tensor, Clips]:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A); with `clip_dual` at most -c A where A < 0.

    arXiv 1707.06347, eq. 7; two ε: arXiv 2503.14476; c: arXiv 1912.09729, eq. 5; sequence ratio: arXiv
    2507.18071, eq. 5.
    """
    r, A = ratios(terms), terms.advantages
    free, held = r * A, r.clamp(1 - config.clip_low, 1 + config.clip_high) * A
    objective, clipped = torch.minimum(free, held), held < free
    clips = {"low": clipped & (A < 0), "high": clipped & (A > 0)}
    if config.clip_dual:
        clips["dual"] = (A < 0) & (objective < config.clip_dual * A)
        objective = torch.where(clips["dual"], config.clip_dual * A, objective)
    return -objective, clips


def cispo(terms: Terms, config: LossConfig) -> tuple[Tensor, Clips]:
    """-sg[clip(r, 1 - ε_low, 1 + ε_high)] · A · log π, where sg stops the gradient (arXiv 2506.13585, eq. 4 and 5).

    A clipped token still has a gradient.
    """
    r = ratios(terms).detach()
    weight = r.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * terms.advantages * terms.logprobs, {"low": r < weight, "high": r > weight}


LOSSES: Mapping[str, Loss] = {"pg": pg, "ppo_clip": ppo_clip, "cispo": cispo}
"""`LossConfig.name` → loss."""
