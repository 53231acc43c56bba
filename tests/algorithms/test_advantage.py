"""Advantages: worked examples, and properties of all values."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightningrl import plugins
from lightningrl.algorithms.advantage import Member, dr_grpo, grpo, opo, reinforce_pp, reinforce_pp_baseline, rloo
from lightningrl.types import Doubles

GROUPWISE = [grpo, rloo, dr_grpo, opo, reinforce_pp_baseline]
ALL = [*GROUPWISE, reinforce_pp]


def member(*values: float, lengths: Sequence[float] | None = None, baselines: Sequence[float] | None = None) -> Member:
    return Member(
        values=np.array(values, np.float64),
        lengths=np.ones(len(values)) if lengths is None else np.array(lengths, np.float64),
        baselines=None if baselines is None else np.array(baselines, np.float64),
    )


def flat(groups: Sequence[Sequence[Doubles]]) -> Doubles:
    return np.concatenate([A for group in groups for A in group])


def test_all_are_known_by_name() -> None:
    assert [
        plugins.load(name, kind="advantage")
        for name in ("grpo", "rloo", "dr_grpo", "opo", "reinforce++-baseline", "reinforce++")
    ] == ALL


def test_grpo_is_the_distance_from_the_mean_in_unbiased_deviations() -> None:
    A = grpo([[member(1.0), member(0.0, 0.0), member(0.0), member(1.0)]])
    s = np.std([1, 0, 0, 1], ddof=1)
    assert [len(a) for a in A[0]] == [1, 2, 1, 1]
    np.testing.assert_allclose(flat(A), [0.5 / s, -0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s], rtol=1e-5)


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(
        flat(rloo([[member(1.0), member(0.0, 0.0), member(0.5)]])), [0.75, -0.75, -0.75, 0.0], atol=1e-12
    )


def test_dr_grpo_is_the_distance_from_the_mean() -> None:
    np.testing.assert_allclose(
        flat(dr_grpo([[member(1.0), member(0.0, 0.0), member(0.5)]])), [0.5, -0.5, -0.5, 0.0], atol=1e-12
    )


def test_opo_weighs_its_mean_by_length() -> None:
    group = [member(1.0, lengths=[3]), member(0.0, 0.0, lengths=[4, 2])]
    np.testing.assert_allclose(flat(opo([group])), [2 / 3, -1 / 3, -1 / 3], atol=1e-12)


def test_reinforce_pp_compares_over_tasks_and_tokens() -> None:
    A = reinforce_pp([[member(1.0, lengths=[2])], [member(0.0), member(0.0)]])
    s = np.std([1, 1, 0, 0], ddof=1)
    np.testing.assert_allclose(flat(A), [0.5 / s, -0.5 / s, -0.5 / s], rtol=1e-5)


def test_reinforce_pp_baseline_takes_the_group_off_and_divides_by_the_batch() -> None:
    A = reinforce_pp_baseline([[member(1.0), member(0.0)], [member(10.0), member(14.0)], [member(3.0)]])
    s = np.std([0.5, -0.5, -2, 2, 0], ddof=1)
    np.testing.assert_allclose(flat(A), np.array([0.5, -0.5, -2, 2, 0]) / s, rtol=1e-5)


@pytest.mark.parametrize("advantage", [grpo, rloo, dr_grpo])
def test_baseline_is_over_rollouts_and_not_over_rows(advantage) -> None:
    few = advantage([[member(1.0), member(0.0), member(0.0)]])
    many = advantage([[member(1.0), member(*[0.0] * 50), member(0.0)]])
    np.testing.assert_allclose(few[0][0], many[0][0], rtol=1e-12)


@pytest.mark.parametrize("advantage", ALL)
@pytest.mark.parametrize(
    "group", [[member(0.7, 0.7)], [member(0.1), member(0.1), member(0.1)], [member(0.1, 0.1), member(0.1)]]
)
def test_group_of_one_and_equal_values_teach_exactly_nothing(advantage, group: list[Member]) -> None:
    assert (flat(advantage([group])) == 0).all()


@pytest.mark.parametrize("advantage", GROUPWISE)
def test_an_equal_group_learns_nothing_from_others_either(advantage) -> None:
    A = advantage([[member(0.3, lengths=[5]), member(0.3)], [member(1.0, lengths=[9]), member(0.0)]])
    assert (flat(A[:1]) == 0).all() and (flat(A[1:]) != 0).all()


def test_rollouts_of_equal_mean_cannot_blow_grpo_up() -> None:
    assert np.abs(flat(grpo([[member(1.0, 0.0), member(0.5, 0.5)]]))).max() < 2.0
    assert np.abs(flat(grpo([[member(1.0, baselines=[0.4]), member(1.0, baselines=[0.9])]]))).max() < 2.0


@pytest.mark.parametrize("advantage", [rloo, dr_grpo, opo])
def test_baselines_of_the_credit_take_the_place_of_the_groups(advantage) -> None:
    np.testing.assert_allclose(flat(advantage([[member(1.0, 0.5, baselines=[0.4, 0.4])]])), [0.6, 0.1], atol=1e-12)


def test_the_scale_is_always_the_advantages() -> None:
    group = [member(1.0, baselines=[0.5]), member(0.0, baselines=[0.2])]
    np.testing.assert_allclose(flat(grpo([group])), np.array([0.5, -0.2]) / np.sqrt(0.25 + 0.04), rtol=1e-5)
    np.testing.assert_allclose(
        flat(reinforce_pp([group])), np.array([0.35, -0.35]) / np.std([0.5, -0.2], ddof=1), rtol=1e-5
    )


def test_an_empty_batch_is_no_error() -> None:
    assert [advantage([]) for advantage in ALL] == [[]] * len(ALL)
    assert [advantage([[]]) for advantage in ALL] == [[[]]] * len(ALL)


numbers = st.sampled_from([-1.0, 0.0, 0.3, 0.5, 1.0, 2.0])
members = st.lists(numbers, min_size=1, max_size=4).map(
    lambda values: member(*values, lengths=range(1, len(values) + 1))
)
batches = st.lists(st.lists(members, min_size=1, max_size=5), min_size=1, max_size=3)


@pytest.mark.parametrize("advantage", ALL)
@given(batch=batches, random=st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(advantage, batch: list[list[Member]], random) -> None:
    orders = [random.sample(range(len(group)), len(group)) for group in batch]
    expected = advantage(batch)
    found = advantage([[group[i] for i in order] for group, order in zip(batch, orders, strict=True)])
    for order, one, other in zip(orders, found, expected, strict=True):
        for i, A in zip(order, one, strict=True):
            np.testing.assert_allclose(A, other[i], atol=1e-9)


@pytest.mark.parametrize("advantage", ALL)
@given(batch=batches)
def test_a_constant_added_to_all_rewards_changes_nothing(advantage, batch: list[list[Member]]) -> None:
    moved = [[Member(values=m.values + 4.0, lengths=m.lengths) for m in group] for group in batch]
    np.testing.assert_allclose(flat(advantage(moved)), flat(advantage(batch)), atol=1e-6)
