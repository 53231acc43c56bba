"""Which keys does each query of a forest read, as the variable-length sequences of a flash-attention kernel?

A segment whose parent ends just before it continues the parent's sequence, so a conversation without branches is one
sequence, and a forest has one sequence per leaf. The queries of a sequence are tokens that follow one another in the
forest: queries are never copied. Its keys are all tokens from the root to its last query, gathered by index. The kernel
aligns both at their ends: query i of L_q may read key j of L_k if j - L_k ≤ i - L_q.

Legend: N tokens · S segments · B sequences · T gathered keys.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sequences of a forest. For the forest of `Forest`'s docstring:

        token_ids  1 2 3 | 7 9 4 6 | 8        query_ends  0 7 8      longest_queries 7
        segment    0       1         2        key_ends    0 7 11     longest_keys    7
        parents   -1       0         0        keys        0 1 2 3 4 5 6 | 0 1 2 7

    Segment 1 continues segment 0: its sequence has seven queries and the same seven keys. Segment 2 is a branch: one
    query, token 7, and the keys of its path.
    """

    first: int
    """The first query's token; 0 unless the plan is a part of a forest's."""
    query_ends: npt.NDArray[np.int32]
    """[B + 1] sequence b has the queries `query_ends[b]:query_ends[b + 1]` of the tokens from `first` on."""
    key_ends: npt.NDArray[np.int32]
    """[B + 1] and the keys `keys[key_ends[b]:key_ends[b + 1]]`."""
    keys: Indices
    """[T] token of each key, in the order of the path."""
    longest_queries: int
    """Most queries of a sequence."""
    longest_keys: int
    """Most keys of a sequence."""


def plan_sequences(
    starts: npt.NDArray[np.int32],
    parents: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    *,
    window: int | None = None,
) -> Plan:
    """The sequences of a forest with `starts` [S + 1], `parents` [S] and `positions` [N]. `window`: most tokens of its
    path that a query reads, itself included; keys that no query of a sequence reaches are not gathered. None: all.
    """
    segments = np.arange(len(parents))
    firsts = np.flatnonzero((parents < 0) | (parents != segments - 1))  # the first segment of each sequence
    query_ends = np.append(starts[firsts], starts[-1:])
    paths: list[Indices] = []
    keys: list[Indices] = []
    for number, segment in enumerate(firsts.tolist()):
        depth = int(positions[query_ends[number]])  # ancestors of the first query
        own = np.arange(query_ends[number], query_ends[number + 1])
        above = own[:0]
        if depth:
            parent = int(np.searchsorted(firsts, parents[segment], side="right")) - 1
            above = paths[parent][:depth]
        paths.append(np.concatenate((above, own)))
        keys.append(paths[-1] if window is None else paths[-1][max(0, depth - window + 1) :])
    lengths = [len(own) for own in keys]
    return Plan(
        first=0,
        query_ends=query_ends.astype(np.int32),
        key_ends=np.cumsum([0, *lengths], dtype=np.int32),
        keys=np.concatenate([np.zeros(0, np.int64), *keys]),
        longest_queries=int(np.diff(query_ends).max(initial=0)),
        longest_keys=max(lengths, default=0),
    )


def parts_of(plan: Plan, *, most_keys: int) -> list[Plan]:
    """The sequences in order, in plans of at most `most_keys` keys each, or of one sequence with more."""
    parts: list[Plan] = []
    b, B = 0, len(plan.query_ends) - 1
    while b < B:
        end = int(np.searchsorted(plan.key_ends, plan.key_ends[b] + most_keys, side="right")) - 1
        end = max(end, b + 1)
        query_ends, key_ends = plan.query_ends[b : end + 1], plan.key_ends[b : end + 1]
        part = Plan(
            first=plan.first + int(query_ends[0]),
            query_ends=query_ends - query_ends[0],
            key_ends=key_ends - key_ends[0],
            keys=plan.keys[key_ends[0] : key_ends[-1]],
            longest_queries=int(np.diff(query_ends).max()),
            longest_keys=int(np.diff(key_ends).max()),
        )
        parts.append(part)
        b = end
    return parts


def readers(keys: Indices) -> list[tuple[Indices, Indices]]:
    """Where each token was gathered to, grouped by how often: pairs of tokens [n] and rows [n m] of `keys` [T].

    For `keys` 0 1 2 3 4 5 6 0 1 2 7: tokens 3 4 5 6 7 with rows 3, 4, 5, 6, 10, and tokens 0 1 2 with rows (0 7),
    (1 8), (2 9). The gradient of a token is the sum over its rows, in their order: it repeats bit for bit, which a
    scattered addition on a GPU does not.
    """
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(keys)
    begins = np.cumsum(counts) - counts
    groups: list[tuple[Indices, Indices]] = []
    for count in np.unique(counts[counts > 0]).tolist():
        tokens = np.flatnonzero(counts == count)
        groups.append((tokens, order[begins[tokens][:, None] + np.arange(count)]))
    return groups


def gathers_nothing(plan: Plan) -> bool:
    """Whether the keys are the queries' own tokens, because no sequence shares a prefix with another."""
    return len(plan.keys) == int(plan.query_ends[-1])
