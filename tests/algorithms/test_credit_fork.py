"""Credit of branched rollouts: what a decision is worth, and what it is compared with."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.credit_fork import fork
from lightningrl.config import AlgorithmConfig
from lightningrl.errors import UserError
from lightningrl.types import Branch, Trajectory
from tests.algorithms.rollouts import call, rollout


def trunk(name: str, reward: float, *, calls: int = 2) -> Trajectory:
    return rollout(name, reward, *(call(f"{name}/{c}", prompt=(0, c), tokens=1) for c in range(calls)))


def branch(of: Trajectory, name: str, reward: float, *, at: int, calls: int = 2) -> Trajectory:
    """It repeats `of` up to call `at`, counted from 0, and makes `calls` calls in all."""
    made = [call(f"{name}/{c}", prompt=(0, c), tokens=1) for c in range(calls)]
    copied = [replace(c, replays=f"{of.rollout_id}/{i}", left_out="replayed") for i, c in enumerate(made[:at])]
    place = Branch(attempt_id=of.rollout_id, call_id=f"{of.rollout_id}/{at}")
    return replace(rollout(name, reward, *copied, *made[at:]), branch=place)


def baselines(group: Sequence[Trajectory], *, shrinkage: float = 1.0) -> list[list[float]]:
    found = [credit.baselines for credit in fork(group, shrinkage=shrinkage)]
    return [[] if b is None else b.tolist() for b in found]


def test_siblings_are_compared_with_each_other_and_the_rest_with_other_families() -> None:
    a = trunk("a", 1.0)
    group = [a, branch(a, "a'", 0.0, at=1), trunk("b", 0.5)]
    of_trunk, of_branch, other = fork(group, siblings="shared")
    assert of_trunk.values.tolist() == [0.5, 1.0]
    assert of_branch.values.tolist()[1:] == [0.0]
    assert baselines(group) == [[0.5, 0.25], [0.5, 0.75], [0.5, 0.5]]
    assert [None if c.shares is None else c.shares.tolist() for c in (of_trunk, of_branch, other)] == [
        [1, 0.5],
        [0.5, 0.5],  # the first call was played back: it is not trained
        [1, 1],
    ]
    assert of_branch.judged is not None
    assert of_branch.judged.tolist() == [False, True]


def test_a_later_place_makes_an_earlier_value_more_exact() -> None:
    a = trunk("a", 1.0, calls=3)
    group = [a, branch(a, "a1", 0.0, at=1, calls=3), branch(a, "a2", 0.0, at=2, calls=3), trunk("b", 0.0, calls=3)]
    values = [credit.values.tolist() for credit in fork(group)]
    assert values[0] == [(0.5 + 0.0) / 2, 0.5, 1.0]
    assert baselines(group, shrinkage=0.0)[0] == [0.0, 0.0, 0.0]
    assert baselines(group, shrinkage=0.0)[1][1:] == [0.5, 0.5]  # the trunk's second call is worth ½
    assert baselines(group, shrinkage=0.0)[2][2:] == [1.0]


def test_a_baseline_does_not_depend_on_the_reward_of_its_own_rollout() -> None:
    for reward in (0.0, 7.0):
        a = trunk("a", reward)
        assert baselines([a, branch(a, "a'", 0.2, at=0), trunk("b", 0.4)])[0] == pytest.approx([0.3, 0.3])
        b = trunk("b", 0.4)
        assert baselines([b, branch(b, "b'", reward, at=1), trunk("c", 0.6)])[1][1] == pytest.approx(0.5)


def test_played_back_calls_are_not_trained_and_a_family_weighs_as_one_rollout() -> None:
    a = trunk("a", 1.0)
    group = [a, branch(a, "a'", 0.0, at=1), trunk("b", 0.5)]
    algorithm = AlgorithmConfig(credit="fork", advantage="rloo", credit_options={"siblings": "shared"})
    made, metrics = lessons_of(group, algorithm)
    weights = {le.transition.call_id: le.weights.tolist() for le in made}
    assert weights == {"a/0": [1 / 4], "a/1": [1 / 8], "a'/0": [0], "a'/1": [1 / 8], "b/0": [1 / 4], "b/1": [1 / 4]}
    assert metrics["tokens/trained"] == 5
    assert metrics["reward/mean"] == 0.75  # of the trunks


def test_a_branch_without_its_trunk_teaches_nothing() -> None:
    a = trunk("a", 1.0)
    group = [branch(a, "a'", 0.0, at=1), trunk("b", 0.5), trunk("c", 1.0)]
    made, _ = lessons_of(group, AlgorithmConfig(credit="fork", advantage="rloo"))
    assert [float(le.advantages[0]) for le in made] == [0, 0, -0.5, -0.5, 0.5, 0.5]


def test_equal_returns_teach_nothing() -> None:
    a = trunk("a", 0.1)
    made, _ = lessons_of(
        [a, *(branch(a, f"a{k}", 0.1, at=1) for k in range(3)), trunk("b", 0.1)],
        AlgorithmConfig(credit="fork", credit_options={"shrinkage": 0.7}, advantage="rloo"),
    )
    assert not any(le.advantages.any() for le in made)


@pytest.mark.parametrize("options", [{"shrinkage": -1.0}, {"siblings": "some"}])
def test_options_out_of_range_are_refused(options: dict[str, float | str]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        lessons_of([], AlgorithmConfig(credit="fork", credit_options=options))


def test_siblings_are_scaled_by_their_own_deviation() -> None:
    """`grpo` divides by the deviation of the answers that a call is compared with, and of the group as one more."""
    a = rollout("a", 10.0, call("a/0", prompt=(0, 0)), call("a/1", prompt=(0, 1)))
    group = [a, branch(a, "a'", 9.0, at=1), trunk("b", 0.0), trunk("c", 5.0)]
    made, _ = lessons_of(group, AlgorithmConfig(credit="fork", credit_options={"shrinkage": 0.0}))
    A = {le.transition.call_id: float(le.advantages[0]) for le in made}
    roots = {"a": 9.5 - 2.5, "b": 0 - (9.5 + 5) / 2, "c": 5 - 9.5 / 2}
    whole = sum(d**2 for d in roots.values()) / 2
    assert A["a/0"] == pytest.approx(roots["a"] / np.sqrt(whole), rel=1e-5)
    assert A["b/1"] == pytest.approx(roots["b"] / np.sqrt(whole), rel=1e-5)
    assert A["a/1"] == pytest.approx(1 / np.sqrt((1 + 1 + whole) / 2), rel=1e-5)
    assert A["a'/1"] == pytest.approx(-A["a/1"])
