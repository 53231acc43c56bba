"""What was each call of a rollout worth? A group of trajectories in, one value per call out.

A credit is a function of all rollouts of one task. Its keyword parameters are what `algorithm.credit_options` sets. It
may bring baselines of its own, which then take the place of the group's; the credits that look at the states of other
rollouts are in `credit_states`.

Legend: R final reward · r_d rewards of call d itself · d ≥ c: d is c or a consequence of c · |c, d| calls in the
longest chain from c to d.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.algorithms.causal import Bools, consequences, distances
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Ints, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The worth of the calls of one rollout. A first call that led to a failed tool (-0.5) and a second that saved the
    day (final reward 1):

    credit                   values       baselines
    uniform                  [1.0 1.0]    None
    discounted, γ = 0.9      [0.4 1.0]    None
    air, γ = 1               [0.5 1.0]    None
    gae_calls, λ = 1         [0.5 1.0]    [V(c1) V(c2)]
    """

    values: Doubles
    """[calls]"""
    baselines: Doubles | None = None
    """[calls] what was to be expected before each call; None: the advantage brings its own."""
    judged: Bools | None = None
    """[calls] False: nothing is known of this call, which is compared with no other; None: all are judged."""


def uniform(group: Sequence[Trajectory]) -> list[Credit]:
    """Every call is worth the final reward: the paper's credit assignment (arXiv 2508.03680, section 3.3). Step rewards
    do not count.
    """
    return [Credit(values=np.full(len(t.transitions), t.reward, np.float64)) for t in group]


def discounted(group: Sequence[Trajectory], *, discount: float) -> list[Credit]:
    """G_c = Σ_{d ≥ c} γ^|c,d| r_d + γ^K R, where K is the length of the longest chain that c begins: the return-to-go
    of every call.

    Two turns, γ = 0.9, the first call rewarded with -0.5, the final reward 1: [-0.5 + 0.9, 1.0]. Parallel branches are
    not in one chain, so a slow one does not discount what a quick one is worth.
    """
    check_share(discount, name="discount")
    return [Credit(values=returns_to_go(t, discount=discount)) for t in group]


def air(group: Sequence[Trajectory], *, discount: float = 1.0) -> list[Credit]:
    """R + Σ_{d ≥ c} γ^|c,d| r_d: the final reward in full, and the intermediate rewards of what came of the call.

    Two turns, γ = 0.5, step rewards 0 and 0.2, the final reward 1: [1.1, 1.2]. (Automatic Intermediate Rewarding: arXiv
    2508.03680, section 3.3.)
    """
    check_share(discount, name="discount")
    return [Credit(values=t.reward + _steps_to_go(t, _chains(t), discount)) for t in group]


def gae_calls(group: Sequence[Trajectory], *, discount: float = 1.0, trace_decay: float = 0.95) -> list[Credit]:
    """Generalised advantages over calls, with V_c what the critic reads at the last token of each prompt. (arXiv
    1506.02438, eq. 16)

        δ_k = r_k + γ V_{k+1} - V_k      A = Σ_k (γλ)^k δ_k      values A + V, baselines V

    The steps k are levels: level k of a call is all of its consequences at distance k. Its rewards add up, its V is the
    mean of theirs; the final reward is at the last level. In a chain that is the textbook; with λ = 1 it is the
    `discounted` return less V, for branches, too. Two turns, V = [0.5 0.8], final reward 1, γ = 1, λ = 0.5: δ = [0.3
    0.2], A = [0.4 0.2], values [0.9 1.0]. A call that is left out and was not shown to the critic is part of the world:
    its rewards are its cause's.
    """
    check_share(discount, name="discount")
    check_share(trace_decay, name="trace_decay")
    return [_gae(t, discount=discount, trace_decay=trace_decay) for t in group]


def _gae(trajectory: Trajectory, *, discount: float, trace_decay: float) -> Credit:
    calls = trajectory.transitions
    if any(call.value is None and call.left_out is None for call in calls):
        raise UserError(
            "credit `gae_calls` needs a critic", hint="take a trainer that has one (`local` does), or another credit"
        )
    seen = np.array([call.value is not None for call in calls], bool)
    after = consequences(calls)
    D, r = distances(after[np.ix_(seen, seen)]), step_rewards(trajectory)
    V = np.array([call.value for call in calls if call.value is not None], np.float64)
    levels = np.zeros((len(V), len(calls)), np.int32)
    levels[:, seen] = D
    for u in np.flatnonzero(~seen):
        levels[:, u] = np.where(after[seen, u], D, -1).max(axis=1, initial=-1)
    A = np.zeros(len(V))
    for c, level in enumerate(levels):
        K = D[c].max() + 1
        r_k = np.bincount(level[level >= 0], weights=r[level >= 0], minlength=K)
        counts = np.bincount(D[c][D[c] >= 0], minlength=K)
        V_k = np.append(np.bincount(D[c][D[c] >= 0], weights=V[D[c] >= 0], minlength=K) / counts, 0.0)
        r_k[-1] += trajectory.reward
        A[c] = ((discount * trace_decay) ** np.arange(K)) @ (r_k + discount * V_k[1:] - V_k[:-1])
    values, baselines = np.zeros(len(calls)), np.zeros(len(calls))
    values[seen], baselines[seen] = A + V, V
    return Credit(values=values, baselines=baselines, judged=seen)


def returns_to_go(trajectory: Trajectory, *, discount: float) -> Doubles:
    """[calls] G_c of `discounted`."""
    D = _chains(trajectory)
    return _steps_to_go(trajectory, D, discount) + discount ** D.max(axis=1, initial=0) * trajectory.reward


def _chains(trajectory: Trajectory) -> Ints:
    return distances(consequences(trajectory.transitions))


def _steps_to_go(trajectory: Trajectory, D: Ints, discount: float) -> Doubles:
    """[calls] Σ_{d ≥ c} γ^|c,d| r_d."""
    return np.where(D >= 0, discount ** np.maximum(D, 0), 0.0) @ step_rewards(trajectory)


def step_rewards(trajectory: Trajectory) -> Doubles:
    """[calls] r_c; 0 where there is none."""
    return np.array([call.reward or 0.0 for call in trajectory.transitions], np.float64)


def check_share(value: float, *, name: str) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"`{name}` is `{value}`", hint="it must be from 0 to 1")
