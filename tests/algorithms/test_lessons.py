"""From trajectories to lessons; above all invariant 6: a group is compared before anything is filtered."""

import dataclasses

import numpy as np
import pytest

from lightningrl.algorithms import lessons_of
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
        rollout(f"{g}{i}", r, call(f"{g}{i}/0", tokens=1), group=g) for g, rs in {"a": (0, 1), "b": (10, 10)}.items() for i, r in enumerate(rs)
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
    [("rollout-mean", [[1 / 12, 1 / 12, 0], [1 / 4]]), ("call-mean", [[1 / 6, 1 / 12, 0], [1 / 6]]), ("token-mean", [[1 / 8, 1 / 8, 0], [1 / 8]])],
)
def test_weights_by_aggregation(aggregation, expected: list[list[float]]) -> None:
    a = rollout("a", 1.0, call("a/0", tokens=2), call("a/1", tokens=4), call("a/2", tokens=9, left_out="agent"))
    b = rollout("b", 0.0, call("b/0", tokens=2))
    silent = rollout("c", 0.0, call("c/0", tokens=5, left_out="policy"), call("c/1", tokens=0))
    found = token_weights([a, b, silent], aggregation=aggregation)
    assert found[2].tolist() == [0, 0]
    np.testing.assert_allclose(found[0], np.array(expected[0]) * 1.0, rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    made, _ = lessons_of([a, b, silent], AlgorithmConfig(aggregation=aggregation))
    assert sum(le.weights.sum() for le in made) == pytest.approx(1.0, rel=1e-12)
    assert [len(le.weights) for le in made] == [2, 4, 9, 2, 5, 0]


def test_credit_of_the_wrong_shape_is_refused(tmp_path) -> None:
    imports = "import numpy as np\nfrom lightningrl.algorithms import Credit\n"
    (tmp_path / "own_credit.py").write_text(imports + "\n\ndef short(group):\n    return [Credit(values=np.zeros(1)) for _ in group]\n")
    trajectories = [rollout("a", 1.0, call("a/0", tokens=2), call("a/1", tokens=2))]
    with pytest.raises(UserError, match="own_credit:short"):
        lessons_of(trajectories, AlgorithmConfig(credit="own_credit:short"), root=tmp_path)
