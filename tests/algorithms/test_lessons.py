"""Trajectories → lessons; above all invariant 6: groups are compared before anything is filtered."""

import dataclasses
from typing import Literal

import numpy as np
import pytest

from lightningrl import plugins
from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.options import bound_credit, discount_of
from lightningrl.algorithms.weights import token_weights
from lightningrl.config import AlgorithmConfig
from lightningrl.errors import UserError
from lightningrl.types import Trajectory
from tests.algorithms.rollouts import call, rollout


def test_advantages_do_not_depend_on_what_is_left_out() -> None:
    group = [rollout(f"r{i}", float(i % 2), call(f"r{i}/0", tokens=3), call(f"r{i}/1", tokens=2)) for i in range(4)]

    def advantages(trajectories: list[Trajectory]) -> list[float]:
        made, _ = lessons_of(trajectories, AlgorithmConfig())
        return [float(le.advantages[0]) for le in made]

    everything = advantages(group)
    left_out = [dataclasses.replace(t, left_out="agent") for t in group[1].transitions]
    assert advantages([group[0], dataclasses.replace(group[1], transitions=tuple(left_out)), *group[2:]]) == everything
    without_calls = advantages([group[0], dataclasses.replace(group[1], transitions=()), *group[2:]])
    assert without_calls == everything[:2] + everything[4:]
    assert 0 not in everything


def test_groups_are_compared_among_themselves() -> None:
    trajectories = [
        rollout(f"{g}{i}", r, call(f"{g}{i}/0", tokens=1), group=g)
        for g, rs in {"a": (0, 1), "b": (10, 10)}.items()
        for i, r in enumerate(rs)
    ]
    made, metrics = lessons_of(trajectories, AlgorithmConfig(advantage="rloo"))
    assert [float(le.advantages[0]) for le in made] == [-1, 1, 0, 0]
    assert [le.group_id for le in made] == ["a", "a", "b", "b"]
    assert (metrics["groups/count"], metrics["groups/equal_rewards"]) == (2, 1)
    assert (metrics["tokens/trained"], metrics["tokens/zero_advantage"]) == (4, 2)


def test_truncated_call_is_worth_less() -> None:
    trajectories = [rollout("a", 1.0, call("a/0", tokens=2, truncated=True)), rollout("b", 1.0, call("b/0", tokens=2))]
    made, _ = lessons_of(trajectories, AlgorithmConfig(advantage="rloo", truncation_penalty=0.3))
    np.testing.assert_allclose([le.advantages[0] for le in made], [-0.3, 0.3], rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("rollout-mean", [[1 / 12, 1 / 12, 0], [1 / 4]]),
        ("call-mean", [[1 / 6, 1 / 12, 0], [1 / 6]]),
        ("token-mean", [[1 / 8, 1 / 8, 0], [1 / 8]]),
    ],
)
def test_weights_by_aggregation(aggregation, expected: list[list[float]]) -> None:
    a = rollout("a", 1.0, call("a/0", tokens=2), call("a/1", tokens=4), call("a/2", tokens=9, left_out="agent"))
    b = rollout("b", 0.0, call("b/0", tokens=2))
    silent = rollout("c", 0.0, call("c/0", tokens=5, left_out="policy"), call("c/1", tokens=0))
    found = token_weights([a, b, silent], aggregation=aggregation, shares=[None, None, None])
    assert found[2].tolist() == [0, 0]
    np.testing.assert_allclose(found[0], np.array(expected[0]) * 1.0, rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    made, _ = lessons_of([a, b, silent], AlgorithmConfig(aggregation=aggregation))
    assert sum(le.weights.sum() for le in made) == pytest.approx(1.0, rel=1e-12)
    assert [len(le.weights) for le in made] == [2, 4, 9, 2, 5, 0]


def test_credit_of_the_wrong_shape_is_refused(tmp_path) -> None:
    imports = "import numpy as np\nfrom lightningrl.algorithms import Credit\n"
    (tmp_path / "own_credit.py").write_text(
        imports + "\n\ndef short(group):\n    return [Credit(values=np.zeros(1)) for _ in group]\n"
    )
    trajectories = [rollout("a", 1.0, call("a/0", tokens=2), call("a/1", tokens=2))]
    with pytest.raises(UserError, match="own_credit:short"):
        lessons_of(trajectories, AlgorithmConfig(credit="own_credit:short"), root=tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "message", "hint"),
    [
        (
            {"credit": "uniform", "credit_options": {"discount": 0.9}},
            "`uniform` has no option `discount`",
            "no options",
        ),
        ({"credit": "tree_loo", "credit_options": {"shrinkag": 1.0}}, "no option `shrinkag`", "`shrinkage`"),
        (
            {"credit": "gigpo", "credit_options": {"root": "/"}},
            "no option `root`",
            "`discount`, `step_weight`, `anchor`",
        ),
        ({"credit": "discounted"}, "needs `discount`", "credit_options.discount"),
        (
            {"credit": "discounted", "credit_options": {"discount": "high"}},
            "`discount` of credit `discounted` is `high`",
            "float",
        ),
        ({"credit": "gigpo", "credit_options": {"anchor": 1.0}}, "`anchor` of credit `gigpo` is `1.0`", "str"),
        ({"credit": "tre_loo"}, "unknown credit `tre_loo`", "`tree_loo`"),
        ({"advantage": "grp"}, "unknown advantage `grp`", "`grpo`"),
    ],
)
def test_a_wrong_name_or_option_is_told_what_is_known(algorithm, message: str, hint: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        lessons_of([rollout("a", 1.0, call("a/0"))], AlgorithmConfig.model_validate(algorithm))
    assert hint in str(caught.value)


def test_an_option_out_of_range_is_refused_before_any_rollout() -> None:
    with pytest.raises(UserError, match="`shrinkage` is `-1"):
        bound_credit(AlgorithmConfig(credit="tree_loo", credit_options={"shrinkage": -1.0}))
    with pytest.raises(UserError, match="`discount` is `2"):
        lessons_of([], AlgorithmConfig(credit="gigpo", credit_options={"discount": 2.0}))


def test_the_discount_of_a_credit_is_known_whether_it_is_set_or_not() -> None:
    assert discount_of(AlgorithmConfig(credit="uniform")) == discount_of(AlgorithmConfig(credit="air")) == 1.0
    assert discount_of(AlgorithmConfig(credit="gigpo")) == 0.95
    assert discount_of(AlgorithmConfig(credit="discounted", credit_options={"discount": 0.5})) == 0.5


def test_options_reach_the_credit() -> None:
    trajectories = [rollout("a", 1.0, call("a/0"), call("a/1")), rollout("b", 0.0, call("b/0"))]
    made, _ = lessons_of(
        trajectories, AlgorithmConfig(credit="discounted", credit_options={"discount": 0.5}, advantage="rloo")
    )
    np.testing.assert_allclose([le.advantages[0] for le in made], [0.5, 1.0, -0.75])


def team(name: str, reward: float, *, planner: float, solver: tuple[float, ...]) -> Trajectory:
    calls = [
        call(f"{name}/p", agent="planner", reward=planner),
        *(call(f"{name}/s{i}", agent="solver", reward=r) for i, r in enumerate(solver)),
    ]
    return rollout(name, reward, *calls)


def test_roles_may_be_compared_for_themselves() -> None:
    trajectories = [
        team("a", 1.0, planner=0.0, solver=(0.5, 0.0)),
        team("b", 0.0, planner=0.2, solver=(0.1,)),
        team("c", 0.5, planner=0.0, solver=()),
    ]
    made, metrics = lessons_of(trajectories, AlgorithmConfig(credit="air", advantage="rloo", group_by="role"))
    # values: a [1.5 | 1.5 1.0], b [0.3 | 0.1], c [0.5]
    expected = {
        "a/p": 1.5 - 0.4,
        "a/s0": 1.5 - 0.1,
        "a/s1": 1.0 - 0.1,
        "b/p": 0.3 - 1.0,
        "b/s0": 0.1 - 1.25,
        "c/p": 0.5 - 0.9,
    }
    assert {le.transition.call_id: pytest.approx(float(le.advantages[0]), abs=1e-6) for le in made} == expected
    assert metrics["advantage/max.planner"] == pytest.approx(1.1, abs=1e-6) and metrics[
        "advantage/mean.solver"
    ] == pytest.approx(0.3833, abs=1e-3)


def test_lessons_name_their_rollout_and_what_the_critic_is_to_learn() -> None:
    trajectories = [
        rollout("a", 1.0, call("a/0", value=0.5), call("a/1", value=0.8)),
        rollout("b", 0.0, call("b/0", value=0.1)),
    ]
    made, _ = lessons_of(
        trajectories, AlgorithmConfig(credit="gae_calls", credit_options={"trace_decay": 0.5}, advantage="rloo")
    )
    assert [le.rollout_id for le in made] == ["a", "a", "b"]
    assert [le.returns for le in made] == [pytest.approx(x) for x in (0.9, 1.0, 0.0)]
    np.testing.assert_allclose([le.advantages[0] for le in made], [0.4, 0.2, -0.1], atol=1e-6)
    without, _ = lessons_of([rollout("a", 1.0, call("a/0"))], AlgorithmConfig())
    assert without[0].returns is None


def test_the_share_of_groups_that_teach_nothing_is_told() -> None:
    rewards = {"a": (1.0, 1.0), "b": (0.0, 1.0), "c": (0.0,), "d": (0.0, 0.0)}
    trajectories = [
        rollout(f"{g}{i}", r, call(f"{g}{i}/0"), group=g) for g, rs in rewards.items() for i, r in enumerate(rs)
    ]
    _, metrics = lessons_of(trajectories, AlgorithmConfig())
    assert (metrics["groups/count"], metrics["groups/equal_rewards"], metrics["groups/equal_share"]) == (4, 3, 0.75)
    assert metrics["groups/silent"] == 3
    assert metrics["reward/std_in_group"] == pytest.approx(np.std([0, 1], ddof=1) / 4)
    assert metrics["advantage/positive_share"] == pytest.approx(1 / 7)


def test_equal_groups_are_not_silent_where_the_whole_batch_or_step_rewards_tell_them_apart() -> None:
    lone = [rollout(f"r{i}", float(i), call(f"r{i}/0"), group=f"g{i}") for i in range(3)]
    _, metrics = lessons_of(lone, AlgorithmConfig(advantage="reinforce++"))
    assert (metrics["groups/equal_rewards"], metrics["groups/silent"]) == (3, 1), (
        "the middle one is the mean of the batch"
    )
    stepped = [rollout(f"r{i}", 1.0, call(f"r{i}/0", reward=float(i))) for i in range(2)]
    _, metrics = lessons_of(stepped, AlgorithmConfig(credit="air"))
    assert (metrics["groups/equal_rewards"], metrics["groups/silent"]) == (1, 0)


@pytest.mark.parametrize("advantage", plugins.names("advantage"))
@pytest.mark.parametrize("by", ["task", "role"])
def test_calls_that_the_critic_did_not_see_change_nobodys_advantage(
    advantage: str, by: Literal["task", "role"]
) -> None:
    def made_of(unseen: int) -> dict[str, float]:
        rollouts = [
            rollout(
                f"r{i}",
                float(i % 3 == 0),
                call(f"r{i}/seen", value=0.3 + 0.1 * i, tokens=i + 1),
                *(call(f"r{i}/unseen{u}", tokens=7, left_out="policy") for u in range(unseen)),
                group=f"g{i // 3}",
            )
            for i in range(6)
        ]
        lessons, _ = lessons_of(rollouts, AlgorithmConfig(credit="gae_calls", advantage=advantage, group_by=by))
        assert all(not lesson.advantages.any() for lesson in lessons if "unseen" in lesson.transition.call_id)
        return {
            lesson.transition.call_id: float(lesson.advantages[0])
            for lesson in lessons
            if "unseen" not in lesson.transition.call_id
        }

    assert made_of(9) == pytest.approx(made_of(0)) and len(set(made_of(0).values())) > 2


@pytest.mark.parametrize("credit", plugins.names("credit"))
@pytest.mark.parametrize("advantage", plugins.names("advantage"))
def test_every_credit_goes_with_every_advantage(credit: str, advantage: str) -> None:
    options = {"discount": 0.9} if credit == "discounted" else {}
    rewards = {"a": (1.0, 0.0, 0.5), "lone": (1.0,), "equal": (0.1, 0.1)}
    trajectories = [
        rollout(
            f"{g}{i}",
            r,
            *(call(f"{g}{i}/{c}", prompt=range(c + 1), value=0.4, reward=-0.1 * c, tokens=c + 1) for c in range(i % 3)),
            group=g,
        )
        for g, rs in rewards.items()
        for i, r in enumerate(rs)
    ]
    for by in ("task", "role"):
        algorithm = AlgorithmConfig.model_validate(
            {"credit": credit, "credit_options": options, "advantage": advantage, "group_by": by}
        )
        made, metrics = lessons_of(trajectories, algorithm)
        assert [le.transition.call_id for le in made] == [
            t.call_id for trajectory in trajectories for t in trajectory.transitions
        ]
        assert all(np.isfinite(le.advantages).all() for le in made) and all(
            np.isfinite(value) for value in metrics.values()
        )
    assert lessons_of([], algorithm)[0] == []
