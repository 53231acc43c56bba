"""Where is a rollout branched? Its places are chosen before anybody looks at what followed them.

The gradient stays unbiased if the choice of a call does not depend on the answer there, or on what came of it. The
rollout's reward came of it, and the number of its calls did, too. So places are chosen from *other* rollouts: of the
same task, and of earlier steps. A task's only rollout takes them from those of other tasks. If the rollout never got
to a place, it is not branched there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightningrl.types import Doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The calls of a trunk that can be branched."""

    roles: Sequence[str]
    """[calls] the agent of each."""
    costs: Doubles
    """[calls] tokens that were sampled from each on: about what a branch there costs."""


@dataclass(slots=True)
class Differences:
    """How often the siblings at a place had different returns, by role and depth, in earlier steps."""

    counts: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict[tuple[str, int], tuple[int, int]])
    """(role, number of the call) → (places where returns differed, places)."""

    def add(self, role: str, depth: int, returns: Sequence[float]) -> None:
        """Take in a place and the returns of its siblings."""
        differed, places = self.counts.get((role, depth), (0, 0))
        self.counts[role, depth] = differed + (len(set(returns)) > 1), places + 1

    def share(self, role: str, depth: int) -> float:
        """The chance that returns differ, by the rule of succession: ½ if nothing is known."""
        differed, places = self.counts.get((role, depth), (0, 0))
        return (differed + 1) / (places + 2)


def places(
    ways: Sequence[Way],
    *,
    count: int,
    seed: int,
    elsewhere: Sequence[Way] = (),
    differences: Differences | None = None,
) -> list[list[int]]:
    """For each trunk of a group the calls at which it is branched, in order. `count`: places in the group.

    Without `differences`, all calls have the same chance. With them, a call's chance grows with the chance that returns
    differ there, and falls with what a branch costs: by the law of total variance, the noise in the return from a call
    is the sum of what the calls from there on decide. So the signal per token falls as their number grows.

    `elsewhere`: trunks of other tasks. They decide if the group has only one trunk; without them its first call does.
    """
    found: list[list[int]] = [[] for _ in ways]
    order = np.random.default_rng(seed).permutation(len(ways)).tolist()
    for i, n in zip(order, _shared_out(count, len(ways)), strict=True):
        rng = np.random.default_rng([seed, i])  # of its own: other draws depend on the length of this trunk
        p = _chances([way for j, way in enumerate(ways) if j != i] or elsewhere, differences)
        drawn = rng.choice(len(p), size=min(n, np.count_nonzero(p)), replace=False, p=p).tolist()
        found[i] = sorted(c for c in drawn if c < len(ways[i].roles))
    return found


def _chances(others: Sequence[Way], differences: Differences | None) -> Doubles:
    """[calls] the chance of each call, from other rollouts."""
    p = np.zeros(max([len(way.roles) for way in others], default=0) or 1)
    for way in others:
        for c, role in enumerate(way.roles):
            p[c] += 1.0 if differences is None else differences.share(role, c) / max(way.costs[c], 1.0)
    return p / p.sum() if p.any() else np.eye(len(p))[0]


def _shared_out(count: int, among: int) -> list[int]:
    return [(count + among - 1 - k) // among for k in range(among)]
