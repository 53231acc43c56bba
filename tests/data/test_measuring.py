"""Which groups are measured: whole ones, and those that teach most."""

import numpy as np

from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.measuring import by_call, measured_groups
from lightningrl.types import Transition


def lesson(group_id: str, call_id: str, advantage: float, *, tokens: int = 5) -> Lesson:
    return Lesson(
        rollout_id=call_id,
        group_id=group_id,
        transition=Transition(
            call_id=call_id,
            parent_call_id=None,
            agent="writer",
            policy_version=0,
            prompt_ids=np.array([1, 2], np.int32),
            completion_ids=np.arange(tokens, dtype=np.int32),
            logprobs=np.zeros(tokens, np.float32),
            reward=None,
        ),
        advantages=np.full(tokens, advantage, np.float32),
        weights=np.ones(tokens),
    )


def group(name: str, size: float) -> list[Lesson]:
    """A group of 10 tokens with advantages of ± `size`."""
    return [lesson(name, f"{name}/{sign:+d}", sign * size) for sign in (1, -1)]


BATCH = [*group("a", 1.0), *group("b", 2.0), *group("c", 1.0), *group("d", 0.0)]


def chosen(tokens: float) -> list[str]:
    return [each.transition.call_id for each in measured_groups(BATCH, tokens=tokens)]


def test_whole_groups_whose_advantages_differ_most_come_first() -> None:
    assert chosen(20) == chosen(29.9) == ["b/+1", "b/-1", "a/+1", "a/-1"]
    assert chosen(40) == ["b/+1", "b/-1", "a/+1", "a/-1", "c/+1", "c/-1", "d/+1", "d/-1"]


def test_one_group_is_measured_in_any_case() -> None:
    assert chosen(0.5) == ["b/+1", "b/-1"]
    assert measured_groups([], tokens=100.0) == []


def test_tokens_of_a_forest_are_told_apart_by_call() -> None:
    made = [lesson("a", "one", 1.0, tokens=2), lesson("a", "none", 0.0, tokens=0), lesson("a", "two", 1.0, tokens=3)]
    forest = build_forest(made, whole=True)
    found = by_call(forest, np.array([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert {name: tokens.tolist() for name, tokens in found.items()} == {
        "one": np.array([0.1, 0.2], np.float32).tolist(),
        "none": [],
        "two": np.array([0.3, 0.4, 0.5], np.float32).tolist(),
    }
    assert list(by_call(forest, np.array([0.1, np.nan, 0.3, 0.4, 0.5]))) == ["none", "two"]
