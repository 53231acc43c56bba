"""Which groups can a task have? All of them with their probabilities, or sampled ones.

Legend: K paths · G rollouts per group · N groups.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import TypeAlias

import numpy as np

from lightningrl.types import Doubles

from .worlds import Path

Group: TypeAlias = list[Path]
"""Rollouts of one task: those that are no branches first."""


def all_groups(paths: Sequence[Path], *, size: int) -> tuple[list[Group], Doubles]:
    """All N groups, regardless of order, and [N] the probability of each."""
    groups = list(combinations_with_replacement(range(len(paths)), size))
    p = np.array([path.probability for path in paths])
    orders = [math.factorial(size) // math.prod(map(math.factorial, Counter(group).values())) for group in groups]
    return [[paths[k] for k in group] for group in groups], np.array(orders) * p[np.array(groups)].prod(axis=1)


def drawn_groups(paths: Sequence[Path], *, count: int, size: int, seed: int) -> list[Group]:
    """N = `count` groups, sampled as in a run."""
    p = np.array([path.probability for path in paths])
    drawn = np.random.default_rng(seed).choice(len(paths), size=(count, size), p=p / p.sum())
    return [[paths[k] for k in group] for group in drawn.tolist()]
