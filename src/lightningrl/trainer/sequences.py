"""What do the tokens of a call or of a rollout come to together? Sums and means over index arrays, given back to every
token.

Legend: M sampled tokens.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightningrl.data.forest import Forest

Level: TypeAlias = Literal["token", "call", "rollout"]


def sequences_of(forest: Forest, level: Level) -> Tensor | None:
    """[M] the call or rollout of each token; None on the level of tokens. Of a sequence only what is trained is there:
    nothing without weight.
    """
    if level == "token":
        return None
    return torch.from_numpy(forest.calls if level == "call" else forest.rollouts).long()


def sum_over(values: Tensor, sequences: Tensor) -> Tensor:
    """[M] → [M] the sum over the sequence that each token is in."""
    return _sums(values, sequences)[sequences]


def mean_over(values: Tensor, sequences: Tensor) -> Tensor:
    """[M] → [M] the mean over the sequence that each token is in."""
    return (_sums(values, sequences) / torch.bincount(sequences).to(values.dtype))[sequences]


def _sums(values: Tensor, sequences: Tensor) -> Tensor:
    count = int(sequences.max()) + 1 if len(sequences) else 0
    return values.new_zeros(count).index_add(0, sequences, values)
