"""What holds for the credit of any group of trunks and branches, whatever their calls, times and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.credit_fork import fork
from lightningrl.causal import consequences
from lightningrl.config import AlgorithmConfig
from lightningrl.types import Branch, Trajectory, Transition
from tests.algorithms.rollouts import call, rollout

REWARDS = st.floats(-2, 2).map(lambda x: round(x, 3))
SPANS = st.tuples(st.integers(0, 6), st.integers(1, 4))
SHRINKAGES = st.sampled_from([0.0, 0.4, 1.0, 8.0])


@dataclass(frozen=True)
class Family:
    trunk: Trajectory
    branches: Sequence[Trajectory]
    """Some may have the same place."""

    @property
    def rollouts(self) -> list[Trajectory]:
        return [self.trunk, *self.branches]


@st.composite
def families(draw: st.DrawFn, *, name: str, most_branches: int = 4) -> Family:
    trunk = rollout(name, draw(REWARDS), *draw(calls(name=name)))
    at = range(len(trunk.transitions))
    places = draw(st.lists(st.sampled_from(at), max_size=most_branches)) if at else []
    branches = [draw(branch(trunk=trunk, place=place, name=f"{name}-{b}")) for b, place in enumerate(places)]
    return Family(trunk, branches)


@st.composite
def calls(draw: st.DrawFn, *, name: str, after: int = 0, most: int = 4) -> list[Transition]:
    """In the order in which they began; some overlap."""
    spans = sorted(draw(st.lists(SPANS, max_size=most)))
    return [
        call(f"{name}/{c}", prompt=[c, len(name)], span=(after + begin, after + begin + length), reward=draw(REWARDS))
        for c, (begin, length) in enumerate(spans)
    ]


@st.composite
def branch(draw: st.DrawFn, *, trunk: Trajectory, place: int, name: str) -> Trajectory:
    """What is played back takes no time; the branching call and all calls after it are sampled."""
    recorded = trunk.transitions
    fresh = consequences(recorded)[place]
    played = [
        replace(c, call_id=f"{name}/{c.call_id}", ended_at=c.started_at, replays=c.call_id, left_out="replayed")
        for i, c in enumerate(recorded)
        if i != place and not fresh[i]
    ]
    at = recorded[place]
    own = replace(at, call_id=f"{name}/at", reward=draw(REWARDS))
    later = draw(calls(name=f"{name}/later", after=int(own.ended_at)))
    made = sorted([*played, own, *later], key=lambda c: c.started_at)
    where = Branch(attempt_id=trunk.rollout_id, call_id=at.call_id)
    return replace(rollout(name, draw(REWARDS), *made), branch=where)


GROUPS = st.integers(2, 4).flatmap(lambda n: st.tuples(*(families(name=f"t{i}") for i in range(n))))


@settings(max_examples=60, deadline=None)
@given(GROUPS, SHRINKAGES, st.data())
def test_no_baseline_depends_on_the_rewards_of_its_own_rollout(
    group: Sequence[Family], shrinkage: float, data: st.DataObject
) -> None:
    rollouts = [member for family in group for member in family.rollouts]
    one = data.draw(st.integers(0, len(rollouts) - 1))
    found = []
    for reward in (3.0, 5.0):  # others' are less: not all are equal
        changed = tuple(replace(c, reward=c.reward if c.replays else reward) for c in rollouts[one].transitions)
        with_it = [*rollouts]
        with_it[one] = replace(rollouts[one], reward=reward, transitions=changed)
        found.append(fork(with_it, shrinkage=shrinkage)[one])
    judged = found[0].judged
    assert judged is not None and found[0].baselines is not None and found[1].baselines is not None
    np.testing.assert_allclose(found[0].baselines[judged], found[1].baselines[judged], rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_shared_siblings_have_the_weight_of_one_answer(group: Sequence[Family]) -> None:
    credits = iter(fork([member for family in group for member in family.rollouts], siblings="shared"))
    for family in group:
        ids = [c.call_id for c in family.trunk.transitions]
        total = np.array(next(credits).shares)
        replaced = consequences(family.trunk.transitions) | np.eye(len(ids), dtype=bool)
        for member in family.branches:
            shares = next(credits).shares
            assert shares is not None and member.branch is not None
            fresh = [share for share, c in zip(shares, member.transitions, strict=True) if c.replays is None]
            assert len(set(fresh)) == 1 and fresh[0] > 0
            total += fresh[0] * replaced[ids.index(str(member.branch.call_id))]
        np.testing.assert_allclose(total, 1, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.builds(Family, families(name="t", most_branches=0).map(lambda f: f.trunk), st.just(())), min_size=2))
def test_without_branches_it_is_the_return_to_go_compared_with_the_other_rollouts(group: Sequence[Family]) -> None:
    rollouts = [replace(family.trunk, rollout_id=f"t{i}") for i, family in enumerate(group)]
    rollouts = [replace(t, transitions=_renamed(t)) for t in rollouts]
    by_fork, _ = lessons_of(rollouts, AlgorithmConfig(credit="fork", advantage="rloo"))
    plain = AlgorithmConfig(credit="discounted", credit_options={"discount": 1.0}, advantage="rloo")
    by_returns, _ = lessons_of(rollouts, plain)
    for one, other in zip(by_fork, by_returns, strict=True):
        np.testing.assert_allclose(one.advantages, other.advantages, rtol=1e-5, atol=1e-6)
        assert one.weights.tobytes() == other.weights.tobytes()


def _renamed(trajectory: Trajectory) -> tuple[Transition, ...]:
    return tuple(replace(c, call_id=f"{trajectory.rollout_id}/{c.call_id}") for c in trajectory.transitions)


@settings(max_examples=40, deadline=None)
@given(GROUPS, SHRINKAGES, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter_and_the_same_order_gives_the_same_bits(
    group: Sequence[Family], shrinkage: float, random: Random
) -> None:
    rollouts = [member for family in group for member in family.rollouts]
    order = list(range(len(rollouts)))
    random.shuffle(order)
    first, again = (fork(rollouts, shrinkage=shrinkage, siblings="shared") for _ in range(2))
    moved = fork([rollouts[i] for i in order], shrinkage=shrinkage, siblings="shared")
    for place, i in enumerate(order):
        for name in ("values", "baselines", "judged", "shares"):
            a, b, c = (np.asarray(getattr(credit, name)) for credit in (first[i], again[i], moved[place]))
            assert a.tobytes() == b.tobytes()
            np.testing.assert_allclose(a, c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("siblings", ["full", "shared"])
def test_a_family_alone_is_compared_at_its_places_only(siblings: str) -> None:
    trunk = rollout("a", 1.0, *(call(f"a/{c}", prompt=[c]) for c in range(2)))
    place = Branch(attempt_id="a", call_id="a/1")
    first = replace(trunk.transitions[0], call_id="b/0", replays="a/0", left_out="replayed")
    other = replace(rollout("b", 0.4, first, call("b/1", prompt=[1])), branch=place)
    of_trunk, of_branch = fork([trunk, other], siblings=siblings)
    assert of_trunk.baselines is not None and of_branch.baselines is not None
    assert (of_trunk.values - of_trunk.baselines).tolist() == [0, 0.6]
    assert of_branch.baselines.tolist()[1] == 1.0
