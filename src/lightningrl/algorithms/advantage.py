"""How good was each call, compared with its group? Values in, advantages of the same shape out.

Baselines are means over rollouts, not over calls: each rollout counts once, however many calls it made. If the credit
has baselines of its own, they replace the group's; the scale is always the advantage's. A group of one rollout, or in
which all values are equal, has advantages of exactly 0, unless the credit has baselines.

Two rollouts of one and two calls with the values 1 and 0, one token each:

    grpo                  [ .71] [-.71 -.71]      rloo     [1.00] [-1.00 -1.00]
    reinforce++           [1.15] [-.58 -.58]      opo      [ .67] [ -.33  -.33]
    reinforce++-baseline  [1.15] [-.58 -.58]      dr_grpo  [ .50] [ -.50  -.50]

Legend: G rollouts of a group · v[i][c] value of call c of rollout i · V[i] mean over c of v[i][c] · l[i][c] number of
tokens sampled in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from lightningrl.types import Doubles, Ints

EPS = 1e-6
"""Added to every standard deviation before division (verl's value; TRL adds 1e-4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rollout of a group, or the calls of one role in it."""

    values: Doubles
    """[calls] at least one. A rollout without a call has its final reward here."""
    baselines: Doubles | None = None
    """[calls] baselines of the credit; None: the advantage computes its own."""
    lengths: Doubles
    """[calls] number of sampled tokens, trained or not: the selection must not change other calls' advantages."""
    peers: Ints | None = None
    """[calls] by the credit: calls with the same number above 0 are compared with each other, those with 0 with the
    whole group. None: 0.
    """


Group: TypeAlias = Sequence[Member]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the values of a rollout's calls are compared with: A = (values - baselines - shift) / scale."""

    baselines: Doubles
    """[calls]"""
    shift: float = 0.0
    """Mean of the differences over the tokens of the batch, if the batch is centred."""
    scale: float | Doubles = 1.0
    """One for all calls, or [calls]."""
    silent: bool = False
    """There is nothing to compare: the advantages are exactly 0."""

    def advantages(self, values: Doubles) -> Doubles:
        """[calls]"""
        return np.zeros_like(values) if self.silent else (values - self.baselines - self.shift) / self.scale


Comparisons: TypeAlias = list[list[Comparison]]
"""For each group, one for each member."""


def grpo(groups: Sequence[Group]) -> list[list[Doubles]]:
    """A[i][c] = (v[i][c] - b) / (s + EPS),  b = mean(V),  s² = 1/(G-1) Σ_i mean_c (v[i][c] - b)².

    arXiv 2402.03300, eq. 4.

    With one value per rollout `s` is the unbiased standard deviation of the group. Where the calls of a rollout differ,
    their spread is part of `s`, so that rollouts with equal means cannot blow it up. Calls that the credit compares
    with their `peers` alone have an `s` of their own; that of the group counts in it as one more peer.
    """
    return _advantages(groups, _by_deviation(groups))


def dr_grpo(groups: Sequence[Group]) -> list[list[Doubles]]:
    """A[i][c] = v[i][c] - mean(V).   (arXiv 2503.20783, eq. 3)

    Division by the deviation would favour tasks that are nearly always or hardly ever solved.
    """
    return _advantages(groups, _by_mean(groups))


def rloo(groups: Sequence[Group]) -> list[list[Doubles]]:
    """A[i][c] = v[i][c] - mean over j ≠ i of V[j].   (arXiv 2402.14740, section 2.2)"""
    return _advantages(groups, _by_others(groups))


def opo(groups: Sequence[Group]) -> list[list[Doubles]]:
    """A[i][c] = v[i][c] - Σ l v / Σ l.   (arXiv 2505.23585, eq. 10)

    This baseline has the least variance if squared gradients grow with length.
    """
    return _advantages(groups, _by_length(groups))


def reinforce_pp(groups: Sequence[Group]) -> list[list[Doubles]]:
    """A = (v - mean) / (s + EPS), over all tokens of the batch: rollouts are compared across tasks.

    arXiv 2501.03262.

    A group of one is no special case; a batch of one is. Baselines of the credit are subtracted first, which gives
    PPO's advantages.
    """
    return _advantages(groups, _by_batch(groups))


def reinforce_pp_baseline(groups: Sequence[Group]) -> list[list[Doubles]]:
    """A = (d - mean) / (s + EPS), over all tokens of the batch, where d[i][c] = v[i][c] - mean(V) of the group.

    arXiv 2501.03262.
    """
    return _advantages(groups, _by_mean_and_batch(groups))


def comparisons(advantage: str, groups: Sequence[Group]) -> Comparisons | None:
    """What a built-in advantage, by name, compares the values with; None for a recipe's own."""
    return _COMPARED[advantage](groups) if advantage in _COMPARED else None


def _advantages(groups: Sequence[Group], compared: Comparisons) -> list[list[Doubles]]:
    return [
        [comparison.advantages(member.values) for comparison, member in zip(of, group, strict=True)]
        for of, group in zip(compared, groups, strict=True)
    ]


def _by_deviation(groups: Sequence[Group]) -> Comparisons:
    return [_normalised(group, _compared(group, _mean(group))) for group in groups]


def _by_mean(groups: Sequence[Group]) -> Comparisons:
    return [_compared(group, _mean(group)) for group in groups]


def _by_others(groups: Sequence[Group]) -> Comparisons:
    return [_compared(group, _others(group)) for group in groups]


def _by_length(groups: Sequence[Group]) -> Comparisons:
    return [_compared(group, _weighted(group)) for group in groups]


def _by_batch(groups: Sequence[Group]) -> Comparisons:
    silent = not _has_baselines(groups) and _no_comparison([member for group in groups for member in group])
    found = [_compared(group, np.zeros(len(group))) for group in groups]
    return [[replace(one, silent=silent) for one in of] for of in _whitened(groups, found)]


def _by_mean_and_batch(groups: Sequence[Group]) -> Comparisons:
    return _whitened(groups, _by_mean(groups))


_COMPARED: Mapping[str, Callable[[Sequence[Group]], Comparisons]] = {
    "grpo": _by_deviation,
    "dr_grpo": _by_mean,
    "rloo": _by_others,
    "opo": _by_length,
    "reinforce++": _by_batch,
    "reinforce++-baseline": _by_mean_and_batch,
}


def _compared(group: Group, baseline: Doubles) -> list[Comparison]:
    """Each member with its own baselines, or else with the `baseline` [members] of the group."""
    silent = not _has_baselines([group]) and _no_comparison(group)
    return [
        Comparison(
            baselines=np.full(len(member.values), b) if member.baselines is None else member.baselines, silent=silent
        )
        for member, b in zip(group, baseline, strict=True)
    ]


def _normalised(group: Group, compared: Sequence[Comparison]) -> list[Comparison]:
    """The same, scaled by the deviation of the group."""
    centred = [member.values - one.baselines for member, one in zip(group, compared, strict=True)]
    if any(member.peers is not None for member in group):
        peers = [np.zeros(len(m.values), np.int32) if m.peers is None else m.peers for m in group]
        return [replace(one, scale=s) for one, s in zip(compared, _of_peers(centred, peers), strict=True)]
    s = np.sqrt(sum(float(np.mean(d**2)) for d in centred) / max(len(group) - 1, 1))
    return [replace(one, scale=s + EPS) for one in compared]


def _of_peers(centred: Sequence[Doubles], peers: Sequence[Ints]) -> list[Doubles]:
    """For each member [calls] the deviation among its peers.

    s²[0] = Σ_i mean_c d² / (G - 1) over calls of peers 0, s²[p] = (Σ_i mean_c d² + s²[0]) / G_p over those of p.
    """
    squares: dict[int, list[float]] = {0: []}
    for d, of in zip(centred, peers, strict=True):
        for p in np.unique(of).tolist():
            squares.setdefault(p, []).append(float(np.mean(d[of == p] ** 2)))
    whole = sum(squares[0]) / max(len(squares[0]) - 1, 1)
    s = {p: np.sqrt((sum(own) + whole) / len(own) if p else whole) + EPS for p, own in squares.items()}
    return [np.array([s[p] for p in of.tolist()], np.float64) for of in peers]


def _whitened(groups: Sequence[Group], compared: Comparisons) -> Comparisons:
    """The same, centred and scaled over all tokens of the batch."""
    if not any(len(group) for group in groups):
        return [[] for _ in groups]
    pairs = [(m, one) for group, of in zip(groups, compared, strict=True) for m, one in zip(group, of, strict=True)]
    d = np.concatenate([member.values - one.baselines for member, one in pairs])
    n = np.concatenate([member.lengths for member, _ in pairs])
    mean = (n @ d) / max(n.sum(), 1)
    s = np.sqrt(n @ (d - mean) ** 2 / max(n.sum() - 1, 1))
    return [[replace(one, shift=mean, scale=s + EPS) for one in of] for of in compared]


def _mean(group: Group) -> Doubles:
    return np.full(len(group), np.mean(_means(group)) if group else 0.0)


def _others(group: Group) -> Doubles:
    V = _means(group)
    return (V.sum() - V) / max(len(V) - 1, 1)


def _weighted(group: Group) -> Doubles:
    total = sum(float(member.lengths.sum()) for member in group)
    weighted = sum(float(member.lengths @ member.values) for member in group)
    return np.full(len(group), weighted / total) if total else _mean(group)


def _means(group: Group) -> Doubles:
    return np.array([member.values.mean() for member in group])


def _has_baselines(groups: Sequence[Group]) -> bool:
    return any(member.baselines is not None for group in groups for member in group)


def _no_comparison(members: Group) -> bool:
    """Whether there is only one rollout, or all values are equal."""
    flat = [value for member in members for value in member.values]
    return len(members) < 2 or all(value == flat[0] for value in flat)
