"""How much is one decision worth? Rollouts that share everything before it, and part there.

    group → families: a trunk, and the branches that repeat it up to one of its calls, a place
          → Q          the mean of all that followed from a call, over every continuation that was tried
          → baselines  the siblings at the same place, shrunk towards the baseline before it
          → shares     what follows a place was sampled several times, and counts once

Legend: G return-to-go of a call, γ = 1 · n branches at a place · κ `shrinkage`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lightningrl.algorithms.credit import Credit, returns_to_go
from lightningrl.causal import Bools, consequences
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Trajectory, Transition


def fork(group: Sequence[Trajectory], *, shrinkage: float = 1.0, siblings: str = "full") -> list[Credit]:
    """A decision is compared with its siblings: the answers of the trunk and of its branches to the same prompt.

        Q(c)      G of c in the trunk and in all branches that repeat c; siblings at a place have equal weights
        b(c)      (n Ḡ + κ b(place before)) / (n + κ)       b(no place before) = mean over the other families
        share(c)  1, or with `siblings = "shared"`
                  in a branch at p: product of 1 / (n + 1) over p and the trunk's places before p
                  in a trunk: 1 minus the shares of all branches at places that c is, or follows

    Ḡ is the mean over the n *other* siblings at the latest place that c is, or follows. No baseline depends on the
    answer that it is compared with, so the gradient of each state is unbiased for every κ, if places are chosen without
    a look at what followed them (`algorithms/places.py`). With "shared" siblings, their sum over states is the gradient
    of the return, too, also for parallel places (docs/oracles.md). With "full" ones, the states behind places have more
    weight: there, an answer costs fewer tokens and is judged with less noise. C3 (arXiv 2603.06859) compares siblings
    in this way. A family alone is compared at its places only. Example: a trunk of two calls with R = 1, branched at
    its second call with R = 0; the other family has the mean ½; κ = 1:

        call            Q              b                        share, if shared
        trunk, first    (1 + 0) / 2    ½                        1
        trunk, second   1              (0 + ½) / 2 = ¼          ½
        branch, second  0              (1 + ½) / 2 = ¾          ½
    """
    if not 0 <= shrinkage < np.inf:
        raise UserError(f"`shrinkage` is `{shrinkage}`", hint="it must be 0 or more")
    if siblings not in ("full", "shared"):
        raise UserError(f"`siblings` is `{siblings}`", hint="it must be `full` or `shared`")
    leaves = [_leaf(trajectory) for trajectory in group]
    families = _families(group, leaves)
    V = np.array([family.value() for family in families])
    roots = (V.sum() - V) / (len(V) - 1) if len(V) > 1 else [None] * len(V)
    found: dict[int, Credit] = {}
    for family, root in zip(families, roots, strict=True):
        found |= family.credits(root=None if root is None else float(root), shrinkage=shrinkage)
    if len({G for leaf in leaves for G in leaf.G.tolist() or [leaf.value]}) == 1:  # rounding gives no advantage
        found = {i: replace(credit, baselines=credit.values) for i, credit in found.items()}
    if siblings == "full":
        found = {i: replace(credit, shares=None) for i, credit in found.items()}
    unknown = [np.zeros(len(leaf.G)) for leaf in leaves]
    return [found.get(i, Credit(values=none, judged=none > 0)) for i, none in enumerate(unknown)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A trunk or a branch."""

    G: Doubles
    """[calls] returns-to-go."""
    value: float
    """Mean of G; the reward of a rollout without a call."""
    after: Bools
    """[calls, calls] whether the column's call can be a consequence of the row's."""
    fresh: Bools
    """[calls] sampled here, not played back."""
    number: Mapping[str, int]
    """Call of the trunk → its number here."""

    def from_(self, c: int) -> Bools:
        """[calls] whether it is c, or can be a consequence of c."""
        return self.after[c] | (np.arange(len(self.G)) == c)

    def credit(
        self, values: Doubles, met: Sequence["Met"], *, root: float | None, shrinkage: float, shares: Doubles
    ) -> Credit:
        """`met`: the places on the way. Without a `root`, a call that no place is before has its own value as baseline:
        it teaches nothing.
        """
        b, peers = np.zeros(len(values)), np.zeros(len(values), np.int32)
        b[:] = values if root is None else root
        kappa = np.full(len(values), 0.0 if root is None else shrinkage)
        for place in sorted(met, key=lambda place: place.call):
            n, total, here = len(place.others), sum(place.others), self.from_(place.call)
            b[here] = (total + kappa[here] * b[here]) / (n + kappa[here])
            kappa[here], peers[here] = shrinkage, place.name
        return Credit(values=values, baselines=b, judged=self.fresh, peers=peers, shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """A place on the way of a trunk or a branch."""

    call: int
    """The number of the call there."""
    name: int
    """Of the place, in the group; above 0."""
    others: Sequence[float]
    """Returns of the other siblings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A trunk and its branches."""

    trunk: int
    """Its index in the group; so are those of branches."""
    ids: Sequence[str]
    """The calls of the trunk."""
    leaves: Sequence[Leaf]
    """All of the group."""
    places: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    """Place → branch → the number of its branching call."""

    def value(self) -> float:
        """The expected return of the task: `Q` of an event before the first call."""
        V = self.leaves[self.trunk].value
        for place in sorted(self.places, reverse=True):
            V = _mean(V, [self.leaves[b].value for b in self.places[place]])
        return V

    def Q(self) -> Doubles:
        """[calls of the trunk]"""
        Q = self.leaves[self.trunk].G.copy()
        for place in sorted(self.places, reverse=True):
            branches = [self.leaves[b] for b in self.places[place]]
            for c, call_id in enumerate(self.ids):
                if c != place and all(call_id in branch.number for branch in branches):
                    Q[c] = _mean(Q[c], [branch.G[branch.number[call_id]] for branch in branches])
        return Q

    def credits(self, *, root: float | None, shrinkage: float) -> dict[int, Credit]:
        """The credit of each leaf. `root`: the mean over the other families; None: there are none."""
        Q = self.Q()
        others = {
            place: [float(self.leaves[b].G[c]) for b, c in branches.items()] for place, branches in self.places.items()
        }
        names = {place: 1 + min(branches) for place, branches in self.places.items()}
        places = {place: Met(call=place, name=names[place], others=others[place]) for place in others}
        trunk = self.leaves[self.trunk]
        found: dict[int, Credit] = {}
        left, shares = 1.0, np.ones(len(Q))
        for place in sorted(self.places):
            branches = self.places[place]
            given, left = left, left / (len(branches) + 1)
            shares[trunk.from_(place)] -= given - left
            for b, c in branches.items():
                leaf = self.leaves[b]
                met = [
                    replace(places[at], call=leaf.number[self.ids[at]])
                    for at in places
                    if at != place and self.ids[at] in leaf.number
                ]
                here = [float(Q[place]), *(float(self.leaves[o].G[d]) for o, d in branches.items() if o != b)]
                met.append(Met(call=c, name=names[place], others=here))
                found[b] = leaf.credit(leaf.G, met, root=root, shrinkage=shrinkage, shares=np.full(len(leaf.G), left))
        met = list(places.values())
        found[self.trunk] = trunk.credit(Q, met, root=root, shrinkage=shrinkage, shares=shares)
        return found


def _mean(own: float, others: Sequence[float]) -> float:
    return (own + sum(others)) / (len(others) + 1)


def _leaf(trajectory: Trajectory) -> Leaf:
    calls = trajectory.transitions
    G = returns_to_go(trajectory, discount=1.0)
    return Leaf(
        G=G,
        value=float(G.mean()) if len(G) else trajectory.reward,
        after=consequences(calls),
        fresh=np.array([call.replays is None for call in calls], bool),
        number={call.replays: c for c, call in enumerate(calls) if call.replays is not None},
    )


def _families(group: Sequence[Trajectory], leaves: Sequence[Leaf]) -> list[Family]:
    """One for each trunk. A branch is in none if its trunk, or its branching call, is not in the group."""
    families = {
        i: Family(trunk=i, ids=[call.call_id for call in trajectory.transitions], leaves=leaves)
        for i, trajectory in enumerate(group)
        if trajectory.branch is None
    }
    of_call = {call_id: family for family in families.values() for call_id in family.ids}
    for b, branch in enumerate(group):
        family = of_call.get(branch.branch.call_id or "") if branch.branch is not None else None
        if branch.branch is None or family is None:
            continue
        place = family.ids.index(str(branch.branch.call_id))
        c = _branching_call(branch, group[family.trunk].transitions[place])
        if c is not None:
            family.places.setdefault(place, {})[b] = c
    return list(families.values())


def _branching_call(branch: Trajectory, place: Transition) -> int | None:
    """The number of the first fresh answer to the prompt of `place`."""
    calls = enumerate(branch.transitions)
    same = (c for c, call in calls if call.replays is None and np.array_equal(call.prompt_ids, place.prompt_ids))
    return next(same, None)
