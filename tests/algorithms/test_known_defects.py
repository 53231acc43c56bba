"""Defects of other libraries, as tests of the correct behaviour, from records to lessons and forests."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightningrl.algorithms import lessons_of
from lightningrl.config import AlgorithmConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.packing import minibatches, pack
from lightningrl.data.transitions import trajectories_of
from lightningrl.errors import UserError
from lightningrl.types import Call, Reward, Rollout, Sampling, Task

ADVANTAGES = ["grpo", "rloo", "dr_grpo", "opo", "reinforce++", "reinforce++-baseline"]


def rollout(name: str, *, group: str = "g", failed: bool = False) -> Rollout:
    """A rollout whose only attempt has the same id."""
    task = Task(id=group, input={}, split="train")
    return Rollout(
        id=name,
        group_id=group,
        task=task,
        status="failed" if failed else "succeeded",
        accepted_attempt_id=None if failed else name,
    )


def call(
    attempt: str,
    index: int,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    says: Sequence[int] = (7,),
    parent: str | None = None,
    agent: str = "writer",
    at: tuple[float, float] = (0.0, 0.0),
) -> Call:
    return Call(
        id=f"{attempt}/{index}",
        attempt_id=attempt,
        index=index,
        parent_call_id=parent,
        agent=agent,
        policy="policy",
        policy_version=0,
        dialect="openai.chat",
        request={},
        response={},
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(says, np.int32),
        logprobs=np.full(len(says), -0.5, np.float32),
        sampling=Sampling(),
        finish_reason="stop",
        capture="rendered" if parent is None else "bridged",
        started_at=at[0],
        ended_at=at[1],
    )


def learn(
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Sequence[Reward],
    *,
    trains: str = "*",
    **algorithm: object,
) -> dict[str, Lesson]:
    """Call id → lesson."""
    trajectories, _ = trajectories_of(
        rollouts, calls, rewards, policy="policy", trains=lambda agent: trains in ("*", agent)
    )
    made, _ = lessons_of(trajectories, AlgorithmConfig.model_validate({"advantage": "rloo", **algorithm}))
    return {lesson.transition.call_id: lesson for lesson in made}


def advantages(made: dict[str, Lesson]) -> dict[str, float]:
    return {name: round(float(lesson.advantages[0]), 6) for name, lesson in made.items()}


def two(
    *, rewards: Sequence[float] = (1.0, 0.0), calls: Sequence[int] = (2, 2)
) -> tuple[list[Rollout], list[Call], list[Reward]]:
    """Rollouts a and b."""
    names = "ab"[: len(rewards)]
    made = [call(name, i) for name, n in zip(names, calls, strict=True) for i in range(n)]
    return (
        [rollout(name) for name in names],
        made,
        [Reward(attempt_id=n, value=r) for n, r in zip(names, rewards, strict=True)],
    )


@pytest.mark.parametrize("credit", ["uniform", "discounted", "air", "tree_loo"])
def test_a_step_reward_never_takes_the_place_of_the_final_one(credit: str) -> None:
    rollouts, calls, rewards = two()
    options = {"credit": credit, "credit_options": {"discount": 1.0} if credit == "discounted" else {}}
    without = advantages(learn(rollouts, calls, rewards, **options))
    last = Reward(attempt_id="a", value=-0.25, name="tool", source="air", call_id="a/1")
    for given in ([*rewards, last], [last, *rewards]):
        found = advantages(learn(rollouts, calls, given, **options))
        moved = 0.0 if credit == "uniform" else -0.25
        assert found["a/0"] == pytest.approx(without["a/0"] + moved) and found["a/1"] == pytest.approx(
            without["a/1"] + moved
        )


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "dr_grpo"])
def test_a_long_rollout_does_not_count_more_in_the_mean_of_its_group(advantage: str) -> None:
    even, odd = (learn(*two(calls=calls), advantage=advantage) for calls in ((1, 1), (1, 40)))
    assert advantages(odd)["a/0"] == advantages(even)["a/0"]


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("credit", ["uniform", "air", "gigpo", "tree_loo"])
def test_selecting_a_role_does_not_change_its_advantages(credit: str, advantage: str) -> None:
    rollouts = [rollout(name) for name in "abc"]
    calls = [
        call(n, i, agent=agent)
        for n, agents in {"a": "pqq", "b": "pp", "c": "q"}.items()
        for i, agent in enumerate(agents)
    ]
    rewards = [Reward(attempt_id=name, value=value) for name, value in {"a": 1.0, "b": 0.0, "c": 0.4}.items()]
    everybody = learn(rollouts, calls, rewards, credit=credit, advantage=advantage)
    selected = learn(rollouts, calls, rewards, trains="p", credit=credit, advantage=advantage)
    assert advantages(selected) == advantages(everybody)
    assert {name for name, lesson in selected.items() if lesson.weights.any()} == {"a/0", "b/0", "b/1"}


def test_a_rollout_of_many_calls_does_not_count_more_in_the_loss() -> None:
    made = learn(*two(calls=(1, 9)))
    shares = [sum(float(le.weights.sum()) for le in made.values() if le.rollout_id == name) for name in "ab"]
    assert shares == [pytest.approx(0.5), pytest.approx(0.5)]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_rollout_that_failed_is_no_reward_of_zero_and_changes_nothing(advantage: str) -> None:
    rollouts, calls, rewards = two(rewards=(1.0, 0.5))
    lost = [call("lost", 0), call("lost", 1)]
    expected = learn(rollouts, calls, rewards, advantage=advantage)
    found = learn([*rollouts, rollout("lost", failed=True)], [*calls, *lost], rewards, advantage=advantage)
    assert advantages(found) == advantages(expected)
    assert [le.weights.tolist() for le in found.values()] == [le.weights.tolist() for le in expected.values()]
    alone = learn([rollouts[0], rollout("lost", failed=True)], [*calls[:2], *lost], rewards[:1], advantage=advantage)
    assert set(alone) == {"a/0", "a/1"} and set(advantages(alone).values()) == {0.0}


@pytest.mark.parametrize("says", [[(7,), (8,), (9,)], [(7,), (7,), (7,)]])
def test_several_samples_of_one_prompt_are_all_kept(says: Sequence[Sequence[int]]) -> None:
    """`n = 2`, or the best of three: the prompt is computed once, and every sample is trained, equal ones too."""
    rollouts, _, rewards = two()
    calls = [call(name, i, says=said) for name in "ab" for i, said in enumerate(says)]
    made = learn(rollouts, calls, rewards)
    assert len(made) == 6 and all(lesson.weights.any() for lesson in made.values())
    forest = build_forest(list(made.values()))
    assert sorted(forest.targets.tolist()) == sorted(token for said in [*says, *says] for token in said)
    assert len(forest.token_ids) == 3


def interleaved() -> list[Call]:
    """Two sub-agents in alternation, each with its own conversation: A1 B1 A2 B2."""
    a1 = call("a", 0, agent="A", prompt=(1, 2), says=(10, 11), at=(0, 2))
    b1 = call("a", 1, agent="B", prompt=(5, 6), says=(12, 13), at=(1, 3))
    a2 = call("a", 2, agent="A", prompt=(1, 2, 10, 11, 3), says=(14,), parent="a/0", at=(2.5, 5))
    b2 = call("a", 3, agent="B", prompt=(5, 6, 12, 13, 7), says=(15,), parent="a/1", at=(4, 6))
    return [a1, b1, a2, b2]


def test_interleaved_sub_agents_each_merge_with_their_own_history() -> None:
    made = learn([rollout("a")], interleaved(), [Reward(attempt_id="a", value=1.0)])
    forest = build_forest(list(made.values()))
    assert sorted(forest.token_ids.tolist()) == [1, 2, 3, 5, 6, 7, 10, 11, 12, 13], (
        "what two calls have read is there once"
    )
    assert sorted(forest.targets.tolist()) == [10, 11, 12, 13, 14, 15], "what was sampled is learnt once"


def test_interleaved_sub_agents_are_credited_for_their_own_consequences() -> None:
    rollouts = [rollout("a"), rollout("b")]
    rewards = [Reward(attempt_id="a", value=0.0), Reward(attempt_id="b", value=0.0)]
    rewards.append(Reward(attempt_id="a", value=1.0, name="tool", source="air", call_id="a/2"))
    made = learn(
        rollouts, [*interleaved(), call("b", 0)], rewards, credit="discounted", credit_options={"discount": 0.5}
    )
    assert advantages(made) == {"a/0": 0.5, "a/1": 0.0, "a/2": 1.0, "a/3": 0.0, "b/0": -0.375}


def test_rows_of_one_rollout_are_never_in_two_optimizer_steps() -> None:
    rollouts = [rollout(f"{g}{i}", group=g) for g in "abcd" for i in range(2)]
    calls = [call(r.id, i, prompt=(1, i), says=(i, i + 1)) for r in rollouts for i in range(5)]
    rewards = [Reward(attempt_id=r.id, value=float(r.id[1])) for r in rollouts]
    made = list(learn(rollouts, calls, rewards).values())
    steps = [{le.rollout_id for le in step} for step in minibatches(made, 3, seed=0)]
    packs = [{le.rollout_id for le in part} for part in pack(made, max_tokens=8)]
    for parts in (steps, packs):
        assert sum(len(part) for part in parts) == len(set.union(*parts)) == len(rollouts)
    assert sum(len(le.weights) for step in minibatches(made, 3, seed=0) for le in step) == sum(
        len(c.completion_ids) for c in calls
    )


def test_a_reward_that_is_not_a_number_is_refused_before_it_can_spread() -> None:
    rollouts, calls, rewards = two()
    with pytest.raises(UserError, match="nan"):
        learn(rollouts, calls, [rewards[0], replace(rewards[1], value=float("nan"))])
