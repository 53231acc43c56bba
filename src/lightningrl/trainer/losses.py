"""Which gradient does a sampled token get from its advantage? Pure functions on logprobs; the objective weighs and
sums.

Legend: M sampled tokens.
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
    """What a loss may look at; every field [M]."""

    logprobs: Tensor
    """Under the current weights; the only one with a gradient."""
    old_logprobs: Tensor
    """Under the weights that the ratio is one to: those that sampled the tokens, or that the batch is first learnt by.
    """
    advantages: Tensor
    sequences: Tensor | None = None
    """Which call or rollout each token shares its ratio with, counted from 0; None: every token has its own."""


Clips: TypeAlias = Mapping[str, Tensor]
"""Why → which tokens were clipped [M]"""
Loss: TypeAlias = Callable[[Terms, LossConfig], tuple[Tensor, Clips]]
"""→ (loss of each token [M], what was clipped)"""


def ratios(terms: Terms) -> Tensor:
    """r_t = π(y_t) / π_old(y_t), or s = (π(y) / π_old(y))^(1/|y|) of the sequence y that the token is in   (arXiv
    2507.18071, eq. 7)

    The gradient of s goes through every token of the sequence, whichever token's advantage it came from.
    """
    delta = terms.logprobs - terms.old_logprobs
    return torch.exp(delta if terms.sequences is None else mean_over(delta, terms.sequences))


def pg(terms: Terms, config: LossConfig) -> tuple[Tensor, Clips]:
    """-A · log π. With A = 1 this is the negative log-likelihood of supervised learning."""
    never = torch.zeros_like(terms.logprobs, dtype=torch.bool)
    return -terms.advantages * terms.logprobs, {"low": never, "high": never}


def ppo_clip(terms: Terms, config: LossConfig) -> tuple[Tensor, Clips]:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A), and with `clip_dual` no more than -c A where A < 0.

    arXiv 1707.06347, eq. 7; two ε: arXiv 2503.14476; c: arXiv 1912.09729, eq. 5; r of a sequence: arXiv 2507.18071, eq.
    5.
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
    """-sg[clip(r, 1 - ε_low, 1 + ε_high)] · A · log π, sg: without gradient. A clipped token still teaches.   (arXiv
    2506.13585, eq. 4 and 5)
    """
    r = ratios(terms).detach()
    weight = r.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * terms.advantages * terms.logprobs, {"low": r < weight, "high": r > weight}


LOSSES: Mapping[str, Loss] = {"pg": pg, "ppo_clip": ppo_clip, "cispo": cispo}
"""`LossConfig.name` → loss."""
