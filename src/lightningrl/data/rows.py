"""Forest → rows: lines of tokens for a service that knows no trees. Each call is in one row; calls that continue each
other share one, so that a branch is sent once.

A row has one target at each position. Two calls with the same prompt need two rows, as their first tokens share a
position.

Legend: N unique tokens of the forest · M sampled tokens · R rows · L tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightningrl.data.forest import Forest
from lightningrl.types import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of tokens, from the root to the last token that predicts a sampled one."""

    token_ids: Ints
    """[L] what the model reads."""
    targets: Ints
    """[L] the token to predict at each position: a sampled one where `terms` names it, else the row's next token."""
    terms: Ints
    """[L] index of the sampled token in the forest's order; -1: no sampled token is predicted here."""


def rows_of(forest: Forest) -> list[Row]:
    """The rows of a forest, longest calls first. Every sampled token is in exactly one row."""
    bounds = np.searchsorted(forest.calls, np.arange(len(forest.call_ids) + 1))
    depths = forest.positions[forest.sources]
    terms_of = [np.arange(low, high) for low, high in pairwise(bounds.tolist()) if high > low]
    terms_of.sort(key=lambda terms: -int(depths[terms[-1]]))
    segments = np.searchsorted(forest.starts, forest.sources, side="right") - 1
    placed: list[tuple[Ints, Ints]] = []
    passing: dict[int, list[int]] = {}
    """Segment → numbers of the rows through it. A row reaches at least as far into it as all calls that come later."""
    for terms in terms_of:
        at, segment = depths[terms], int(segments[terms[-1]])
        number = next((n for n in passing.get(segment, ()) if (placed[n][1][at] < 0).all()), None)
        if number is None:
            number, chain = len(placed), _chain(forest, segment)
            path = _path(forest, chain, end=int(forest.sources[terms[-1]]))
            placed.append((path, np.full(len(path), -1, np.int32)))
            for passed in chain:
                passing.setdefault(passed, []).append(number)
        placed[number][1][at] = terms
    return [_row(forest, path, terms) for path, terms in placed]


def _chain(forest: Forest, segment: int) -> list[int]:
    """Segments from the root to `segment`."""
    found: list[int] = []
    while segment >= 0:
        found.append(segment)
        segment = int(forest.parents[segment])
    return found[::-1]


def _path(forest: Forest, chain: Sequence[int], *, end: int) -> Ints:
    """[L] indices of the tokens of a chain of segments, up to `end`."""
    starts = forest.starts
    ranges = [np.arange(starts[segment], starts[segment + 1], dtype=np.int32) for segment in chain[:-1]]
    return np.concatenate([*ranges, np.arange(starts[chain[-1]], end + 1, dtype=np.int32)])


def _row(forest: Forest, path: Ints, terms: Ints) -> Row:
    tokens = forest.token_ids[path]
    following = np.append(tokens[1:], tokens[-1:])
    return Row(token_ids=tokens, targets=np.where(terms < 0, following, forest.targets[terms]), terms=terms)
