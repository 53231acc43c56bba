"""Which gradient does a sampled token get? Pure functions on logprobs; the trainer only weighs and sums.

Legend: M sampled tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightningrl.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a loss may look at; every field [M]."""

    logprobs: Tensor
    """Under the current weights; the only one with a gradient."""
    old_logprobs: Tensor
    """Under the weights that sampled the tokens."""
    advantages: Tensor


Loss: TypeAlias = Callable[[Terms, LossConfig], tuple[Tensor, Tensor]]
"""→ (loss of each token [M], which tokens were clipped [M])"""


def pg(terms: Terms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-A · log π. With A = 1 this is the negative log-likelihood of supervised learning."""
    return -terms.advantages * terms.logprobs, torch.zeros_like(terms.logprobs, dtype=torch.bool)


def ppo_clip(terms: Terms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - ε_low, 1 + ε_high) A),  r = π / π_old of each token.   (arXiv 1707.06347, eq. 7; two ε: arXiv 2503.14476)"""
    r = torch.exp(terms.logprobs - terms.old_logprobs)
    A = terms.advantages
    free, held = r * A, r.clamp(1 - config.clip_low, 1 + config.clip_high) * A
    return -torch.minimum(free, held), held < free


LOSSES: Mapping[str, Loss] = {"pg": pg, "ppo_clip": ppo_clip}
"""`LossConfig.name` → loss."""
