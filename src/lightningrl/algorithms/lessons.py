"""Advantage and weight of each sampled token: credit → truncation penalty → advantage within groups → weights.

Everything is computed over all members of a group. Calls that are left out only get a weight of 0 at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lightningrl import plugins
from lightningrl.algorithms.advantage import Comparison, Member, comparisons
from lightningrl.algorithms.credit import Credit
from lightningrl.algorithms.options import bound_credit
from lightningrl.algorithms.weights import token_weights
from lightningrl.config import AlgorithmConfig
from lightningrl.data.forest import Lesson
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Trajectory, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Calls of one rollout that are compared with those of other rollouts."""

    rollout: int
    calls: list[int]
    """Indices into the trajectory; empty: the rollout made no call, and its final reward is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """How the advantage of a call came about: A = (value - baseline - shift) / scale."""

    value: float
    """By the credit, minus the truncation penalty."""
    baseline: float | None
    """None: unknown, as the advantage is the recipe's own."""
    shift: float
    """Mean of the differences over the tokens of the batch; 0 unless the advantage centres the batch."""
    scale: float
    silent: bool
    """There was nothing to compare: the advantage is exactly 0."""
    own: bool
    """Whether the baseline is the credit's."""
    rollouts: int
    """Number of rollouts of the group that were compared."""


def lessons_of(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, *, root: Path | None = None
) -> tuple[list[Lesson], dict[str, float]]:
    """One lesson per call, in order, and metrics. `root`: where a recipe's own functions are imported from.

    Two rollouts of one task: the first succeeds (1) in two calls of one and three tokens, the second fails (0) in one
    call of two tokens. With uniform credit, rloo and rollout-mean:

        call     value   advantage of each token   weight of each token
        r1/c1    1       1                         1/8
        r1/c2    1       1                         1/8
        r2/c1    0       -1                        1/4
    """
    credits = _credits(trajectories, algorithm, root=root)
    advantages = _advantages(trajectories, credits, algorithm, root=root)
    shares = [credit.shares for credit in credits]
    weights = token_weights(trajectories, aggregation=algorithm.aggregation, shares=shares)
    made = [
        Lesson(
            rollout_id=trajectory.rollout_id,
            group_id=trajectory.group_id,
            transition=call,
            advantages=np.full(len(call.completion_ids), A[c], dtype=np.float32),
            weights=np.full(len(call.completion_ids), w[c], dtype=np.float64),
            returns=None if call.value is None else float(credit.values[c]),
        )
        for trajectory, credit, A, w in zip(trajectories, credits, advantages, weights, strict=True)
        for c, call in enumerate(trajectory.transitions)
    ]
    return made, _metrics(trajectories, made, by_role=algorithm.group_by == "role")


def accounts_of(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, *, root: Path | None = None
) -> dict[str, Account]:
    """Call id → how its advantage in `lessons_of` came about. Calls whose value is unknown are left out."""
    credits = _credits(trajectories, algorithm, root=root)
    found: dict[str, Account] = {}
    for batch, members in _compared(trajectories, credits, algorithm):
        compared = comparisons(algorithm.advantage, members)
        for g, seats in enumerate(batch):
            for i, seat in enumerate(seats):
                own = _accounts(seat, credits[seat.rollout], compared[g][i] if compared else None, rollouts=len(seats))
                calls = trajectories[seat.rollout].transitions
                found |= {calls[c].call_id: account for c, account in zip(seat.calls, own, strict=True)}
    return found


def _accounts(seat: Seat, credit: Credit, compared: Comparison | None, *, rollouts: int) -> list[Account]:
    return [
        Account(
            value=float(credit.values[c]),
            baseline=None if compared is None else float(compared.baselines[place]),
            shift=0.0 if compared is None else float(compared.shift),
            scale=1.0 if compared is None else float(np.broadcast_to(compared.scale, len(seat.calls))[place]),
            silent=compared is not None and compared.silent,
            own=credit.baselines is not None,
            rollouts=rollouts,
        )
        for place, c in enumerate(seat.calls)
    ]


def groups(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    """Group id → indices of its trajectories."""
    members: dict[str, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.group_id, []).append(i)
    return members


def _credits(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, *, root: Path | None) -> list[Credit]:
    """The credit of each trajectory, minus the truncation penalty."""
    credit = bound_credit(algorithm, root=root)
    found: dict[int, Credit] = {}
    for members in groups(trajectories).values():
        made = credit([trajectories[i] for i in members])
        if len(made) != len(members):
            raise UserError(
                f"credit `{algorithm.credit}` gave `{len(made)}` credits",
                hint=f"the group has {len(members)} rollouts: one for each",
            )
        for i, given in zip(members, made, strict=True):
            found[i] = _checked(given, trajectories[i].transitions, algorithm)
    return [found[i] for i in range(len(trajectories))]


def _checked(credit: Credit, calls: Sequence[Transition], algorithm: AlgorithmConfig) -> Credit:
    for array in (credit.values,) if credit.baselines is None else (credit.values, credit.baselines):
        _check(array, shape=(len(calls),), what=f"credit `{algorithm.credit}`")
    penalties = algorithm.truncation_penalty * np.array([call.truncated for call in calls], np.float64)
    return replace(credit, values=credit.values - penalties)


def _advantages(
    trajectories: Sequence[Trajectory], credits: Sequence[Credit], algorithm: AlgorithmConfig, *, root: Path | None
) -> list[Doubles]:
    """For each trajectory [calls]."""
    compare = plugins.load(algorithm.advantage, kind="advantage", root=root)
    advantages = [np.zeros_like(credit.values) for credit in credits]
    for batch, members in _compared(trajectories, credits, algorithm):
        for seats, found in zip(batch, compare(members), strict=True):
            for seat, A in zip(seats, found, strict=True):
                _check(A, shape=(max(len(seat.calls), 1),), what=f"advantage `{algorithm.advantage}`")
                advantages[seat.rollout][seat.calls] = A[: len(seat.calls)]
    return advantages


def _compared(
    trajectories: Sequence[Trajectory], credits: Sequence[Credit], algorithm: AlgorithmConfig
) -> Iterator[tuple[list[list[Seat]], list[list[Member]]]]:
    """(seats, members) [groups][members] of each batch, ready to be compared."""
    for batch in _batches(trajectories, by_role=algorithm.group_by == "role"):
        batch = [_comparable([_judged(seat, credits[seat.rollout]) for seat in seats], credits) for seats in batch]
        yield batch, [[_member(trajectories[s.rollout], s, credits[s.rollout]) for s in seats] for seats in batch]


def _batches(trajectories: Sequence[Trajectory], *, by_role: bool) -> list[list[list[Seat]]]:
    """[batches][groups][members]: one batch, or one per role, without the rollouts that never used that role."""
    members = groups(trajectories).values()
    if not by_role:
        return [[[Seat(rollout=i, calls=list(range(len(trajectories[i].transitions)))) for i in of] for of in members]]
    roles = sorted({call.agent for t in trajectories for call in t.transitions})
    of_role = {
        (i, role): [c for c, call in enumerate(t.transitions) if call.agent == role]
        for i, t in enumerate(trajectories)
        for role in roles
    }
    return [
        [[Seat(rollout=i, calls=of_role[i, role]) for i in of if of_role[i, role]] for of in members] for role in roles
    ]


def _judged(seat: Seat, credit: Credit) -> Seat:
    return seat if credit.judged is None else replace(seat, calls=[c for c in seat.calls if credit.judged[c]])


def _comparable(seats: Sequence[Seat], credits: Sequence[Credit]) -> list[Seat]:
    """Without rollouts that made no call, if the credit has baselines: there is none for them."""
    own = any(credits[seat.rollout].baselines is not None for seat in seats)
    return [seat for seat in seats if seat.calls or not own]


def _member(trajectory: Trajectory, seat: Seat, credit: Credit) -> Member:
    if not seat.calls:
        return Member(values=np.array([trajectory.reward]), lengths=np.zeros(1))
    return Member(
        values=credit.values[seat.calls],
        baselines=None if credit.baselines is None else credit.baselines[seat.calls],
        peers=None if credit.peers is None else credit.peers[seat.calls],
        lengths=np.array([len(trajectory.transitions[c].completion_ids) for c in seat.calls], np.float64),
    )


def _check(array: Doubles, *, shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape or not np.isfinite(array).all():
        raise UserError(
            f"{what} gave `{array}`", hint=f"it must give finite numbers of shape {shape}: one for each call"
        )


def _metrics(trajectories: Sequence[Trajectory], made: Sequence[Lesson], *, by_role: bool) -> dict[str, float]:
    trained = [lesson for lesson in made if lesson.weights.any()]
    roles = sorted({lesson.transition.agent for lesson in trained}) if by_role else []
    of_roles = {role: _statistics([lesson for lesson in trained if lesson.transition.agent == role]) for role in roles}
    A = _trained_advantages(trained)
    return {
        **_group_metrics(trajectories),
        "groups/silent": float(_silent(made)),
        **{f"advantage/{name}": value for name, value in _statistics(trained).items()},
        **{
            f"advantage/{name}.{role}": value
            for role, statistics in of_roles.items()
            for name, value in statistics.items()
        },
        "tokens/trained": float(len(A)),
        "tokens/zero_advantage": float(np.count_nonzero(A == 0)),
    }


def _group_metrics(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Metrics of the groups, without branches. A group of one counts as equal."""
    trunks = [trajectory for trajectory in trajectories if trajectory.branch is None]
    rewards = [[trunks[i].reward for i in members] for members in groups(trunks).values()]
    equal = sum(len(set(group)) == 1 for group in rewards)
    return {
        "reward/mean": float(np.mean([t.reward for t in trunks])) if trunks else 0.0,
        "reward/std_in_group": sum(float(np.std(group, ddof=1)) for group in rewards if len(group) > 1)
        / max(len(rewards), 1),
        "groups/count": float(len(rewards)),
        "groups/equal_rewards": float(equal),
        "groups/equal_share": equal / max(len(rewards), 1),
    }


def _silent(made: Sequence[Lesson]) -> int:
    """Number of groups with trained calls whose advantages are all 0."""
    loudest: dict[str, float] = {}
    for lesson in made:
        if lesson.weights.any():
            loudest[lesson.group_id] = max(loudest.get(lesson.group_id, 0.0), float(np.abs(lesson.advantages).max()))
    return sum(largest == 0 for largest in loudest.values())


def _statistics(trained: Sequence[Lesson]) -> dict[str, float]:
    A = _trained_advantages(trained)
    if not len(A):
        return {"mean": 0.0, "std": 0.0, "max": 0.0, "positive_share": 0.0}
    return {
        "mean": float(A.mean()),
        "std": float(A.std()),
        "max": float(np.abs(A).max()),
        "positive_share": float(np.mean(A > 0)),
    }


def _trained_advantages(trained: Sequence[Lesson]) -> Doubles:
    """[trained tokens]"""
    return np.concatenate([lesson.advantages for lesson in trained] or [np.zeros(0, np.float32)]).astype(np.float64)
