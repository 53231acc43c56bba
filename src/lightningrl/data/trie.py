"""Which prefixes do these sequences share? A path-compressed token trie, flattened depth first.

A sorted sequence shares no longer prefix with any earlier one than with its neighbour. So the lengths of the
neighbours' common prefixes determine the trie, and no tree of objects is built.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.prefix import common_prefix
from lightningrl.types import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """`starts` and `parents` as in `Forest`: segment `s` holds the tokens `starts[s]:starts[s + 1]`."""

    token_ids: Ints
    """[N]"""
    positions: Ints
    """[N]"""
    starts: Ints
    """[S + 1]"""
    parents: Ints
    """[S]"""
    tails: list[Ints]
    """For each sequence, the indices in `token_ids` of its last tokens."""


def sort_sequences(sequences: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """The lexicographic order, and in that order the length of the prefix shared with the sequence before."""
    keys = [s.astype(">u4").tobytes() for s in sequences]  # big-endian bytes compare like token ids
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = [0] * len(order)
    for rank in range(1, len(order)):
        a, b = sequences[order[rank - 1]], sequences[order[rank]]
        shared[rank] = common_prefix(a, b)
    return order, shared


def count_unique(sequences: Sequence[Ints]) -> int:
    """Number of tokens in the trie of these sequences."""
    _, shared = sort_sequences(sequences)
    return sum(len(s) for s in sequences) - sum(shared)


def build_trie(sequences: Sequence[Ints], *, tails: Sequence[int]) -> Trie:
    """The trie of non-empty sequences. `tails`: for each sequence, how many of its last tokens to locate."""
    order, shared = sort_sequences(sequences)
    longest = max((len(s) for s in sequences), default=0)
    path = np.empty(longest, dtype=np.int32)  # index of the token at each depth of the current sequence
    tokens, positions = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    found: list[Ints] = [np.empty(0, np.int32)] * len(sequences)
    parent_of: dict[int, int] = {}  # first token of a segment → last token of its parent
    N, previous = 0, 0
    for i, depth in zip(order, shared, strict=True):
        length = len(sequences[i])
        if depth == 0:
            parent_of[N] = -1
        elif depth < min(length, previous):  # a branch: the new path and the rest of the old one begin segments
            parent_of[N] = parent_of[int(path[depth])] = int(path[depth - 1])
        path[depth:length] = np.arange(N, N + length - depth)
        found[i] = path[length - tails[i] : length].copy()
        tokens.append(sequences[i][depth:])
        positions.append(np.arange(depth, length, dtype=np.int32))
        N, previous = N + length - depth, length
    starts = np.array(sorted(parent_of), dtype=np.int32)
    last = np.array([parent_of[int(s)] for s in starts], dtype=np.int32)
    return Trie(
        token_ids=np.concatenate(tokens).astype(np.int32),
        positions=np.concatenate(positions),
        starts=np.append(starts, np.int32(N)).astype(np.int32),
        parents=np.where(last < 0, -1, np.searchsorted(starts, last, side="right") - 1).astype(np.int32),
        tails=found,
    )
