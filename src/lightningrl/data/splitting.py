"""Split a forest in two, by whole calls or rollouts, so that the losses of both parts add up to the loss of the whole.

Legend as in `forest`: N unique tokens · S segments · M sampled tokens · K calls.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightningrl.data.forest import Forest
from lightningrl.types import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some calls of a forest, with the tokens that they read."""

    forest: Forest
    terms: Ints
    """[m] its sampled tokens, as indices into the terms of the whole."""
    calls: Ints
    """[k] its calls, as indices into `call_ids` of the whole."""


def split(forest: Forest, *, unit: Literal["call", "rollout"]) -> tuple[Part, Part] | None:
    """Two parts with half of the calls or rollouts each; neighbours in the forest, which share prefixes, stay together.
    None if there is only one.
    """
    unit_of = np.arange(len(forest.call_ids))
    if unit == "rollout":
        unit_of[forest.calls] = forest.rollouts
    order = unit_of[np.argsort(forest.states, kind="stable")]
    units = list(dict.fromkeys(order.tolist()))
    if len(units) < 2:
        return None
    first = np.isin(unit_of, units[: len(units) // 2])
    return part_of(forest, first), part_of(forest, ~first)


def part_of(forest: Forest, kept: np.ndarray) -> Part:
    """The part with the calls that are `kept` [K]."""
    terms, calls = np.flatnonzero(kept[forest.calls]), np.flatnonzero(kept)
    tokens, starts, parents = _pruned(forest, np.concatenate((forest.sources[terms], forest.states[calls])))
    place = np.cumsum(tokens) - 1  # of each token that is left
    _, rollouts = np.unique(forest.rollouts[terms], return_inverse=True)
    part = Forest(
        token_ids=forest.token_ids[tokens],
        positions=forest.positions[tokens],
        starts=starts,
        parents=parents,
        sources=place[forest.sources[terms]].astype(np.int32),
        targets=forest.targets[terms],
        logprobs=forest.logprobs[terms],
        proximal=forest.proximal[terms],
        advantages=forest.advantages[terms],
        weights=forest.weights[terms],
        temperatures=forest.temperatures[terms],
        calls=np.searchsorted(calls, forest.calls[terms]).astype(np.int32),
        rollouts=rollouts.astype(np.int32),
        call_ids=tuple(forest.call_ids[k] for k in calls),
        states=place[forest.states[calls]].astype(np.int32),
        returns=None if forest.returns is None else forest.returns[calls],
    )
    return Part(forest=part, terms=terms.astype(np.int32), calls=calls.astype(np.int32))


def _pruned(forest: Forest, ends: np.ndarray) -> tuple[np.ndarray, Ints, Ints]:
    """What is left if only the tokens at `ends` and their ancestors are kept: which tokens [N], `starts`, `parents`."""
    lengths = np.diff(forest.starts)
    left = np.zeros(len(lengths), np.int64)  # tokens of each segment
    segments = np.searchsorted(forest.starts, ends, side="right") - 1
    np.maximum.at(left, segments, ends - forest.starts[segments] + 1)
    for s in range(len(left) - 1, -1, -1):  # children come after their parents, and continue after the last token
        if left[s] and forest.parents[s] >= 0:
            left[forest.parents[s]] = lengths[forest.parents[s]]
    within = np.arange(len(forest.token_ids)) - np.repeat(forest.starts[:-1], lengths)
    kept = np.flatnonzero(left)
    above = forest.parents[kept]
    parents = np.where(above < 0, -1, np.searchsorted(kept, above))
    starts = np.concatenate(([0], np.cumsum(left[kept])))
    return within < np.repeat(left, lengths), starts.astype(np.int32), parents.astype(np.int32)
