"""How much is each call worth, compared with calls of other rollouts in the same state? Credits with baselines.

The state of a call is its exact prompt. Rollouts of one task begin in the same state and diverge when they sample
different answers.

Legend: G rollouts of a group · R final reward · G_c return-to-go of call c.
"""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lightningrl import plugins
from lightningrl.algorithms.credit import Credit, check_share, returns_to_go
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Trajectory, Transition

Visits: TypeAlias = dict[bytes, dict[int, float]]
"""State → rollout → mean return of its calls from that state."""


def gigpo(
    group: Sequence[Trajectory],
    *,
    discount: float = 0.95,
    step_weight: float = 1.0,
    anchor: str = "",
    root: Path | None = None,
) -> list[Credit]:
    """Group-in-group: rollouts are compared with rollouts, calls with calls of the same anchor state. (arXiv
    2505.10978, eq. 3, 6 to 8)

        values R + ω G_c      baselines mean R + ω mean G over all calls, of any rollout, with c's anchor

    The difference is A^E + ω A^S. γ is `discount`, ω is `step_weight`. The anchor is the exact prompt, or the result of
    `anchor` (`module:function` from a `Transition` to anything hashable), e.g. a state of the environment that several
    prompts describe. Example: the first call of two rollouts, R = 1 and 0, γ = 1, ω = 1: values [2, 0], baselines [1,
    1]. Later calls have different prompts: each is its own step group, with the baseline 0.5 + G_c. Biased: a call is
    part of its own baseline, so rarely visited states have too little weight (docs/oracles.md).
    """
    check_share(discount, name="discount")
    key: Callable[[Transition], Hashable] = plugins.load(anchor, kind="anchor", root=root) if anchor else _prompt
    if not group:
        return []
    G = [returns_to_go(t, discount=discount) for t in group]
    keys = [[key(call) for call in t.transitions] for t in group]
    step_groups: dict[Hashable, list[float]] = {}
    for own, anchors in zip(G, keys, strict=True):
        for G_c, at in zip(own, anchors, strict=True):
            step_groups.setdefault(at, []).append(G_c)
    mean_G = {at: np.mean(found) for at, found in step_groups.items()}
    mean_R = np.mean([t.reward for t in group])
    return [
        Credit(
            values=t.reward + step_weight * own,
            baselines=mean_R + step_weight * np.array([mean_G[at] for at in anchors], np.float64),
        )
        for t, own, anchors in zip(group, G, keys, strict=True)
    ]


def tree_loo(group: Sequence[Trajectory], *, shrinkage: float = 1.0) -> list[Credit]:
    """The return-to-go (γ = 1) with a leave-one-out baseline at each state of the prefix tree.

        b(s) = (n Ḡ + κ b(parent)) / (n + κ)      b(root) = mean over the other rollouts of their mean value

    n and Ḡ are the number and the mean return of *other* rollouts through s; κ is `shrinkage`; the parent of s is the
    longest prompt in the group that s continues. The baseline of a rollout depends on that rollout only through its
    prompts, so it is unbiased for every κ. κ = 0: the mean at s, or at the nearest visited ancestor. κ → ∞: the
    baseline of `rloo`. Example: three rollouts, R = 1, 0, 0. The first two differ from the third in their first call
    and have the same prompt in their second; κ = 1:

        call          values      n·Ḡ        b(parent)   baselines
        first         1  0  0     0  1  1    0  ½  ½     0  ½  ½       b(root): all rollouts were in this state
        second        1  0        0  1       0  ½        0  ¾          n = 1: (0 + 0) / 2, (1 + ½) / 2
        third's own         0          -         ½              ½      no other rollout: b(parent)
    """
    if not 0 <= shrinkage < np.inf:
        raise UserError(
            f"`shrinkage` is `{shrinkage}`",
            hint='it must be 0 or more; for the limit use `advantage = "rloo"` and credit `air`',
        )
    values = [returns_to_go(t, discount=1.0) for t in group]
    if len(group) < 2 or _all_equal(values, group):
        return [Credit(values=v, baselines=v.copy()) for v in values]
    V = np.array([v.mean() if len(v) else t.reward for v, t in zip(values, group, strict=True)])
    root = (V.sum() - V) / (len(V) - 1)
    visits = _visits(group, values)
    parents = _parents(list(visits))
    return [
        Credit(
            values=values[i],
            baselines=_baselines(t, i, root=float(root[i]), visits=visits, parents=parents, shrinkage=shrinkage),
        )
        for i, t in enumerate(group)
    ]


def _baselines(
    trajectory: Trajectory, i: int, *, root: float, visits: Visits, parents: dict[bytes, bytes | None], shrinkage: float
) -> Doubles:
    """[calls] b at each call of rollout i."""
    known: dict[bytes | None, float] = {None: root}

    def b(state: bytes | None) -> float:
        path: list[bytes] = []
        while state is not None and state not in known:
            path.append(state)
            state = parents[state]
        for s in reversed(path):
            others = [G for j, G in visits[s].items() if j != i]
            known[s] = (
                (sum(others) + shrinkage * known[parents[s]]) / (len(others) + shrinkage)
                if others
                else known[parents[s]]
            )
        return known[path[0] if path else state]

    return np.array([b(_prompt(call) or None) for call in trajectory.transitions], np.float64)


def _visits(group: Sequence[Trajectory], values: Sequence[Doubles]) -> Visits:
    """Mean returns by state. A rollout counts once per state, even if it visits the state several times."""
    found: dict[bytes, dict[int, list[float]]] = {}
    for i, (trajectory, v) in enumerate(zip(group, values, strict=True)):
        for call, G_c in zip(trajectory.transitions, v, strict=True):
            if len(call.prompt_ids):
                found.setdefault(_prompt(call), {}).setdefault(i, []).append(float(G_c))
    return {state: {i: sum(G) / len(G) for i, G in of.items()} for state, of in found.items()}


def _parents(states: Sequence[bytes]) -> dict[bytes, bytes | None]:
    """State → the longest other state that is its prefix; None: the root. Sorting puts prefixes first."""
    parents: dict[bytes, bytes | None] = {}
    path: list[bytes] = []
    for state in sorted(states):
        while path and not state.startswith(path[-1]):
            path.pop()
        parents[state] = path[-1] if path else None
        path.append(state)
    return parents


def _prompt(call: Transition) -> bytes:
    return call.prompt_ids.astype(np.int32, copy=False).tobytes()


def _all_equal(values: Sequence[Doubles], group: Sequence[Trajectory]) -> bool:
    """Whether all values are equal. If so, the values are their own baselines: rounding gives no advantage."""
    flat: list[Any] = [G_c for v, t in zip(values, group, strict=True) for G_c in (v if len(v) else [t.reward])]
    return all(G_c == flat[0] for G_c in flat)
