"""Sums and means over the tokens of a call or rollout, repeated for every token.

Legend: M sampled tokens.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightningrl.data.forest import Forest

Level: TypeAlias = Literal["token", "call", "rollout"]


def sequences_of(forest: Forest, level: Level, *, device: torch.device) -> Tensor | None:
    """[M] number of each token's call or rollout; None for the level `token`. Only tokens with weight are included."""
    if level == "token":
        return None
    return torch.from_numpy(forest.calls if level == "call" else forest.rollouts).long().to(device)


def sum_over(values: Tensor, sequences: Tensor) -> Tensor:
    """Values [M] → [M] sum over each token's sequence."""
    return _sums(values, sequences)[sequences]


def mean_over(values: Tensor, sequences: Tensor) -> Tensor:
    """Values [M] → [M] mean over each token's sequence."""
    return (_sums(values, sequences) / _sums(torch.ones_like(values), sequences).clamp(min=1))[sequences]


def _sums(values: Tensor, sequences: Tensor) -> Tensor:
    """[M] sum of each sequence, and zeros: there are no more sequences than tokens."""
    return torch.zeros_like(values).index_add(0, sequences, values)
