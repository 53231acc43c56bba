"""How much is each call of a rollout worth? A group of trajectories in, one value per call out.

A credit sees all rollouts of one task. Its keyword parameters are set by `algorithm.credit_options`. It may return
baselines, which then replace the group's. `credit_states` has the credits that compare calls across rollouts.

Legend: R final reward · r_d rewards of call d · d ≥ c: d is c or a consequence of c · |c, d| length of the longest
chain from c to d.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.causal import Bools, consequences, distances
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Ints, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The values of the calls of one rollout. An example: the first call leads to a failed tool (-0.5), the second
    corrects it, and the final reward is 1:

        credit                   values       baselines
        uniform                  [1.0 1.0]    None
        discounted, γ = 0.9      [0.4 1.0]    None
        air, γ = 1               [0.5 1.0]    None
        gae_calls, λ = 1         [0.5 1.0]    [V(c1) V(c2)]
    """

    values: Doubles
    """[calls]"""
    baselines: Doubles | None = None
    """[calls] expected value before each call; None: the advantage computes its own."""
    judged: Bools | None = None
    """[calls] False: the call's value is unknown, and it is not compared; None: all values are known."""
    peers: Ints | None = None
    """[calls] see `advantage.Member`."""
    shares: Doubles | None = None
    """[calls] weight of the call's tokens in the loss, relative to other calls; None: 1."""


def uniform(group: Sequence[Trajectory]) -> list[Credit]:
    """Every call gets the final reward (arXiv 2508.03680, section 3.3). Rewards of single calls are ignored."""
    return [Credit(values=np.full(len(t.transitions), t.reward, np.float64)) for t in group]


def discounted(group: Sequence[Trajectory], *, discount: float) -> list[Credit]:
    """The return-to-go of every call: G_c = Σ_{d ≥ c} γ^|c,d| r_d + γ^K R. K: length of the longest chain from c.

    Two turns, γ = 0.9, first call rewarded with -0.5, final reward 1: [-0.5 + 0.9, 1.0]. Parallel branches are not in
    one chain, so a slow branch does not discount the value of a fast one.
    """
    check_share(discount, name="discount")
    return [Credit(values=returns_to_go(t, discount=discount)) for t in group]


def air(group: Sequence[Trajectory], *, discount: float = 1.0) -> list[Credit]:
    """R + Σ_{d ≥ c} γ^|c,d| r_d: the full final reward, plus the rewards of the call and its consequences.

    Two turns, γ = 0.5, rewards 0 and 0.2, final reward 1: [1.1, 1.2]. (Automatic Intermediate Rewarding: arXiv
    2508.03680, section 3.3.)
    """
    check_share(discount, name="discount")
    return [Credit(values=t.reward + _steps_to_go(t, _chains(t), discount)) for t in group]


def gae_calls(group: Sequence[Trajectory], *, discount: float = 1.0, trace_decay: float = 0.95) -> list[Credit]:
    """Generalised advantage estimation over calls. V_c is the critic's value at the last token of each prompt. (arXiv
    1506.02438, eq. 16)

        δ_k = r_k + γ V_{k+1} - V_k      A = Σ_k (γλ)^k δ_k      values A + V, baselines V

    The steps k are levels: level k of a call has all of its consequences at distance k. A level's r is the sum of their
    rewards, its V the mean of their values; the final reward belongs to the last level. On a chain this is the usual
    estimator; with λ = 1 it is the `discounted` return minus V, also for branches. Two turns, V = [0.5 0.8], final
    reward 1, γ = 1, λ = 0.5: δ = [0.3 0.2], A = [0.4 0.2], values [0.9 1.0]. A call that is left out and has no value
    is part of the environment: its rewards count to the call that caused it.
    """
    check_share(discount, name="discount")
    check_share(trace_decay, name="trace_decay")
    return [_gae(t, discount=discount, trace_decay=trace_decay) for t in group]


def _gae(trajectory: Trajectory, *, discount: float, trace_decay: float) -> Credit:
    calls = trajectory.transitions
    if any(call.value is None and call.left_out is None for call in calls):
        raise UserError(
            "credit `gae_calls` needs a critic", hint="use a trainer with a critic, such as `local`, or another credit"
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
