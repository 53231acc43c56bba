"""Credit, advantages and weights; above all invariant 6: a group is compared before anything is filtered."""

import dataclasses

import numpy as np
import pytest

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.advantage import grpo, rloo
from lightningrl.algorithms.weights import token_weights
from lightningrl.config import AlgorithmConfig
from lightningrl.errors import UserError
from lightningrl.types import Doubles, Trajectory, Transition


def transition(name: str, tokens: int, *, left_out: str | None = None, truncated: bool = False) -> Transition:
    return Transition(
        call_id=name,
        parent_call_id=None,
        agent="writer",
        policy_version=0,
        prompt_ids=np.arange(3, dtype=np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        reward=None,
        truncated=truncated,
        left_out=left_out,
    )


def trajectory(name: str, reward: float, *calls: Transition, group: str = "g") -> Trajectory:
    return Trajectory(rollout_id=name, group_id=group, task_id="t", transitions=calls, reward=reward)


def arrays(*values: list[float]) -> list[Doubles]:
    return [np.array(v, dtype=np.float64) for v in values]


def test_grpo_is_the_distance_from_the_mean_in_unbiased_deviations() -> None:
    A = grpo(arrays([1.0], [0.0, 0.0], [0.0], [1.0]))
    s = np.std([1, 0, 0, 1], ddof=1)
    assert [len(a) for a in A] == [1, 2, 1, 1]
    np.testing.assert_allclose(np.concatenate(A), [0.5 / s, -0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s], rtol=1e-5)


def test_rloo_is_the_distance_from_the_mean_of_the_others() -> None:
    A = rloo(arrays([1.0], [0.0, 0.0], [0.5]))
    np.testing.assert_allclose(np.concatenate(A), [0.75, -0.75, -0.75, 0.0], atol=1e-12)


@pytest.mark.parametrize("advantage", [grpo, rloo])
def test_baseline_is_over_rollouts_and_not_over_rows(advantage) -> None:
    few = advantage(arrays([1.0], [0.0], [0.0]))
    many = advantage(arrays([1.0], [0.0] * 50, [0.0]))
    assert few[0] == pytest.approx(many[0], rel=1e-12)


@pytest.mark.parametrize("advantage", [grpo, rloo])
@pytest.mark.parametrize("values", [arrays([0.7, 0.7]), arrays([0.1], [0.1], [0.1]), arrays([0.1, 0.1], [0.1])])
def test_group_of_one_and_equal_rewards_teach_exactly_nothing(advantage, values: list[Doubles]) -> None:
    assert all((a == 0).all() for a in advantage(values))


def test_rollouts_of_equal_mean_cannot_blow_grpo_up() -> None:
    assert np.abs(np.concatenate(grpo(arrays([1.0, 0.0], [0.5, 0.5])))).max() < 2.0


def test_advantages_do_not_depend_on_what_is_left_out() -> None:
    group = [trajectory(f"r{i}", float(i % 2), transition(f"r{i}/0", 3), transition(f"r{i}/1", 2)) for i in range(4)]

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
        trajectory(f"{g}{i}", r, transition(f"{g}{i}/0", 1), group=g) for g, rs in {"a": (0, 1), "b": (10, 10)}.items() for i, r in enumerate(rs)
    ]
    made, metrics = lessons_of(trajectories, AlgorithmConfig(advantage="rloo"))
    assert [float(le.advantages[0]) for le in made] == [-1, 1, 0, 0]
    assert [le.group_id for le in made] == ["a", "a", "b", "b"]
    assert (metrics["groups/count"], metrics["groups/equal_rewards"]) == (2, 1)
    assert (metrics["tokens/trained"], metrics["tokens/zero_advantage"]) == (4, 2)


def test_truncated_call_is_worth_less() -> None:
    trajectories = [trajectory("a", 1.0, transition("a/0", 2, truncated=True)), trajectory("b", 1.0, transition("b/0", 2))]
    made, _ = lessons_of(trajectories, AlgorithmConfig(advantage="rloo", truncation_penalty=0.3))
    np.testing.assert_allclose([le.advantages[0] for le in made], [-0.3, 0.3], rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("rollout-mean", [[1 / 12, 1 / 12, 0], [1 / 4]]), ("call-mean", [[1 / 6, 1 / 12, 0], [1 / 6]]), ("token-mean", [[1 / 8, 1 / 8, 0], [1 / 8]])],
)
def test_weights_by_aggregation(aggregation, expected: list[list[float]]) -> None:
    a = trajectory("a", 1.0, transition("a/0", 2), transition("a/1", 4), transition("a/2", 9, left_out="agent"))
    b = trajectory("b", 0.0, transition("b/0", 2))
    silent = trajectory("c", 0.0, transition("c/0", 5, left_out="policy"), transition("c/1", 0))
    found = token_weights([a, b, silent], aggregation=aggregation)
    assert found[2].tolist() == [0, 0]
    np.testing.assert_allclose(found[0], np.array(expected[0]) * 1.0, rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    made, _ = lessons_of([a, b, silent], AlgorithmConfig(aggregation=aggregation))
    assert sum(le.weights.sum() for le in made) == pytest.approx(1.0, rel=1e-12)
    assert [len(le.weights) for le in made] == [2, 4, 9, 2, 5, 0]


def test_credit_of_the_wrong_shape_is_refused(tmp_path) -> None:
    (tmp_path / "own_credit.py").write_text("import numpy as np\n\n\ndef short(trajectory):\n    return np.zeros(1)\n")
    trajectories = [trajectory("a", 1.0, transition("a/0", 2), transition("a/1", 2))]
    with pytest.raises(UserError, match="own_credit:short"):
        lessons_of(trajectories, AlgorithmConfig(credit="own_credit:short"), root=tmp_path)
