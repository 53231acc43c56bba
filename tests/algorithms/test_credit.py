"""Credits: worked examples, and properties of all rollouts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightningrl.algorithms.credit import Credit, air, discounted, gae_calls, uniform
from lightningrl.algorithms.credit_states import gigpo, tree_loo
from lightningrl.errors import UserError
from lightningrl.types import Trajectory, Transition
from tests.algorithms.rollouts import call, rollout

FLAT = 1e-12


def values(credits: list[Credit]) -> list[list[float]]:
    return [credit.values.round(12).tolist() for credit in credits]


def baselines(credits: list[Credit]) -> list[list[float]]:
    assert all(credit.baselines is not None for credit in credits)
    return [credit.baselines.round(12).tolist() for credit in credits if credit.baselines is not None]


TWO = rollout("r", 1.0, call("c1", reward=-0.5), call("c2"))


def test_two_turns_by_hand() -> None:
    assert values(uniform([TWO])) == [[1.0, 1.0]]
    assert values(discounted([TWO], discount=0.9)) == [[0.4, 1.0]]
    assert values(air([TWO])) == [[0.5, 1.0]]
    assert values(air([rollout("r", 1.0, call("c1"), call("c2", reward=0.2))], discount=0.5)) == [[1.1, 1.2]]


def test_generalised_advantages_by_hand() -> None:
    two = rollout("r", 1.0, call("c1", value=0.5), call("c2", value=0.8))
    (credit,) = gae_calls([two], discount=1.0, trace_decay=0.5)
    assert values([credit]) == [[0.9, 1.0]] and baselines([credit]) == [[0.5, 0.8]]


@pytest.mark.parametrize(("discount", "trace_decay"), [(1.0, 0.95), (0.9, 0.5), (0.7, 0.0), (0.9, 1.0)])
def test_generalised_advantages_of_a_chain_are_the_recursion_of_the_textbook(
    discount: float, trace_decay: float
) -> None:
    rng = np.random.default_rng(0)
    V, r = rng.normal(size=6), rng.normal(size=6)
    chain = rollout("r", 0.7, *(call(f"c{i}", value=V[i], reward=r[i]) for i in range(6)))
    A, expected = 0.0, np.zeros(6)
    for t in reversed(range(6)):
        after, earned = (V[t + 1], r[t]) if t < 5 else (0.0, r[t] + 0.7)
        A = earned + discount * after - V[t] + discount * trace_decay * A
        expected[t] = A
    (credit,) = gae_calls([chain], discount=discount, trace_decay=trace_decay)
    assert credit.baselines is not None
    np.testing.assert_allclose(credit.values - credit.baselines, expected, atol=1e-12)


def test_generalised_advantages_in_branches_are_the_returns_less_the_critic_where_nothing_decays() -> None:
    team = rollout(
        "r",
        1.0,
        call("plan", value=0.1, reward=0.2, span=(0, 1)),
        call("x", value=0.3, reward=0.4, span=(1, 9)),
        call("y", value=0.5, reward=0.6, span=(1, 2)),
        call("z", value=0.7, reward=0.8, span=(3, 4)),
    )
    (credit,), (expected,) = gae_calls([team], discount=0.9, trace_decay=1.0), discounted([team], discount=0.9)
    np.testing.assert_allclose(credit.values, expected.values, atol=1e-12)


def test_generalised_advantages_in_branches_expect_what_they_expect_on_average() -> None:
    branches = call("x", value=0.3, span=(1, 9)), call("y", value=0.5, span=(1, 2))
    (credit,) = gae_calls(
        [rollout("r", 1.0, call("plan", value=0.1, reward=0.2, span=(0, 1)), *branches)], trace_decay=0.5
    )
    np.testing.assert_allclose(credit.values, [0.1 + (0.2 + 0.4 - 0.1) + 0.5 * (1.0 - 0.4), 1.0, 1.0])


def test_baselines_lean_on_the_nearest_state_and_not_on_the_root() -> None:
    """Two rollouts share three calls, a third shares two."""
    deep = [call("c1", prompt=(0,)), call("c2", prompt=(0, 1)), call("c3", prompt=(0, 1, 2))]
    group = [
        rollout("r1", 1.0, *deep),
        rollout("r2", 0.0, *deep),
        rollout("r3", 0.6, *deep[:2]),
        rollout("r4", 0.0, deep[0]),
    ]
    root, second = (0 + 0.6 + 0) / 3, ((0 + 0.6) + 0.2) / 3
    np.testing.assert_allclose(baselines(tree_loo(group))[0], [root, second, (0 + second) / 2], atol=1e-9)


def test_a_call_that_the_critic_was_not_shown_is_part_of_the_world() -> None:
    seen = [call("c1", value=0.5), call("tool", left_out="policy", reward=0.3), call("c2", value=0.8)]
    merged = [call("c1", value=0.5, reward=0.3), call("c2", value=0.8)]
    (with_gap,), (without,) = gae_calls([rollout("r", 1.0, *seen)]), gae_calls([rollout("r", 1.0, *merged)])
    np.testing.assert_allclose(with_gap.values[[0, 2]], without.values, atol=1e-12)
    with pytest.raises(UserError, match="needs a critic"):
        gae_calls([rollout("r", 1.0, call("c1"))])


def test_parallel_branches_do_not_discount_each_other() -> None:
    def worth(*slow: Transition) -> float:
        calls = [call("plan", span=(0, 1)), *slow, call("quick", span=(1.5, 9))]
        return float(discounted([rollout("r", 1.0, *calls)], discount=0.5)[0].values[-1])

    assert worth() == worth(call("s1", span=(1, 2)), call("s2", span=(2, 3)), call("s3", span=(3, 8))) == 1.0
    together = rollout("r", 1.0, call("plan", span=(0, 1)), call("a", span=(1, 3), reward=1.0), call("b", span=(2, 4)))
    assert values(discounted([together], discount=0.5)) == [[0.5 + 0.5, 1.0 + 1.0, 1.0]]


def test_calls_are_compared_with_calls_from_the_same_anchor_state() -> None:
    first = rollout("r1", 1.0, call("a"), call("b", prompt=(0, 1, 2, 7)))
    second = rollout("r2", 0.0, call("a"), call("c", prompt=(0, 1, 2, 8)))
    made = gigpo([first, second], discount=1.0)
    assert values(made) == [[2, 2], [0, 0]] and baselines(made) == [[1, 1.5], [1, 0.5]]
    weighted = gigpo([first, second], discount=0.5, step_weight=2.0)
    assert values(weighted) == [[2, 3], [0, 0]] and baselines(weighted) == [[1, 2.5], [1, 0.5]]


def test_an_anchor_may_be_what_a_recipe_says(tmp_path) -> None:
    (tmp_path / "own_anchor.py").write_text("def last(transition):\n    return int(transition.prompt_ids[-1])\n")
    group = [rollout("r1", 1.0, call("a", prompt=(1, 5))), rollout("r2", 0.0, call("b", prompt=(2, 5)))]
    assert baselines(gigpo(group, discount=1.0)) == [[1.5], [0.5]]
    assert baselines(gigpo(group, discount=1.0, anchor="own_anchor:last", root=tmp_path)) == [[1.0], [1.0]]


def tree(*returns: float) -> list[Trajectory]:
    """The first two rollouts differ from the third in their first call."""
    prompts = [(0, 1, 2, 7), (0, 1, 2, 7), (0, 1, 2, 8)]
    return [
        rollout(f"r{i}", R, call("c1"), call("c2", prompt=p))
        for i, (R, p) in enumerate(zip(returns, prompts, strict=True))
    ]


def test_baselines_of_the_prefix_tree_by_hand() -> None:
    group = tree(1.0, 0.0, 0.0)
    assert values(tree_loo(group)) == [[1, 1], [0, 0], [0, 0]]
    assert baselines(tree_loo(group)) == [[0, 0], [0.5, 0.75], [0.5, 0.5]]
    assert baselines(tree_loo(group, shrinkage=0.0)) == [[0, 0], [0.5, 1.0], [0.5, 0.5]]


def test_without_shrinkage_a_baseline_is_the_mean_of_the_others_at_that_state() -> None:
    group = [rollout(f"r{i}", R, call("c1"), call("c2", prompt=(0, 1, 2, 7))) for i, R in enumerate((1.0, 0.0, 0.6))]
    for mine, others in zip(baselines(tree_loo(group, shrinkage=0.0)), (0.3, 0.8, 0.5), strict=True):
        np.testing.assert_allclose(mine, others)


def test_nothing_to_compare_is_exactly_nothing() -> None:
    alike = [rollout(f"r{i}", 0.1, call("c1"), call("c2", prompt=(0, 1, 2, i))) for i in range(3)]
    for group in (alike, tree(1.0, 0.0, 0.0)[:1]):
        assert all(
            credit.baselines is not None and (credit.values == credit.baselines).all() for credit in tree_loo(group)
        )


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_options_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="shrinkage"):
        tree_loo([], shrinkage=value)
    for credit in (discounted, air, gae_calls, gigpo):
        with pytest.raises(UserError, match="discount"):
            credit([], discount=value)


@st.composite
def groups_of_rollouts(draw: st.DrawFn) -> list[Trajectory]:
    """Rollouts through a small tree of prompts, with rewards of calls; some make no call."""
    made: list[Trajectory] = []
    for i in range(draw(st.integers(2, 5))):
        prompt: tuple[int, ...] = (0,)
        calls: list[Transition] = []
        for c in range(draw(st.integers(0, 4))):
            calls.append(call(f"c{c}", prompt=prompt, reward=draw(st.sampled_from([None, -1.0, 0.5]))))
            prompt = draw(st.sampled_from([(*prompt, 1), (*prompt, 2), (0,)]))
        made.append(rollout(f"r{i}", draw(st.sampled_from([0.0, 0.25, 1.0])), *calls))
    return made


@given(groups_of_rollouts(), st.sampled_from([0.0, 1.0, 7.0]))
def test_a_rollout_is_never_part_of_its_own_baseline(group: list[Trajectory], shrinkage: float) -> None:
    richer = [dataclasses.replace(group[0], reward=group[0].reward + 10.0), *group[1:]]
    before, after = (
        tree_loo(group, shrinkage=shrinkage)[0].baselines,
        tree_loo(richer, shrinkage=shrinkage)[0].baselines,
    )
    assert before is not None and after is not None
    everything_was_equal = len({v for credit in tree_loo(group) for v in credit.values}) < 2
    if not everything_was_equal:
        np.testing.assert_allclose(after, before, atol=FLAT)


@given(groups_of_rollouts())
def test_with_all_shrinkage_only_the_root_is_left(group: list[Trajectory]) -> None:
    made = tree_loo(group, shrinkage=1e12)
    V = [float(c.values.mean()) if len(c.values) else t.reward for c, t in zip(made, group, strict=True)]
    for i, credit in enumerate(made):
        if len({*V}) > 1:
            assert credit.baselines is not None
            np.testing.assert_allclose(
                credit.baselines, np.full(len(credit.values), np.mean(V[:i] + V[i + 1 :])), atol=1e-9
            )


@given(groups_of_rollouts(), st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(group: list[Trajectory], random) -> None:
    order = list(range(len(group)))
    random.shuffle(order)
    for credit in (uniform, air, gigpo, tree_loo):
        expected, found = credit(group), credit([group[i] for i in order])
        for i, one in zip(order, found, strict=True):
            np.testing.assert_allclose(one.values, expected[i].values, atol=FLAT)
            if one.baselines is not None and (baselines := expected[i].baselines) is not None:
                np.testing.assert_allclose(one.baselines, baselines, atol=FLAT)
