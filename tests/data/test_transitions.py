"""Invariant 3: every sampled token of an accepted attempt is trained once, or counted in a report with the reason."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from lightningrl.data.transitions import trajectories_of
from lightningrl.errors import GraderError
from lightningrl.types import Branch, Call, Reward, Rollout, Sampling, Task


def rollout(name: str, *, group: str = "g", **changes: Any) -> Rollout:
    made = Rollout(
        id=name,
        group_id=group,
        task=Task(id="t", input={}, split="train"),
        status="succeeded",
        accepted_attempt_id=f"{name}/1",
    )
    return dataclasses.replace(made, **changes)


def call(attempt: str, index: int, *, tokens: int = 4, **changes: Any) -> Call:
    made = Call(
        id=f"{attempt}/{index}",
        attempt_id=attempt,
        index=index,
        parent_call_id=None,
        agent="writer",
        policy="policy",
        policy_version=2,
        dialect="openai.chat",
        request={},
        response={},
        prompt_ids=np.arange(3, dtype=np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        sampling=Sampling(temperature=0.8),
        finish_reason="stop",
        capture="rendered",
    )
    return dataclasses.replace(made, **changes)


def final(rollout_id: str, value: float = 1.0, **changes: Any) -> Reward:
    return dataclasses.replace(Reward(attempt_id=f"{rollout_id}/1", value=value), **changes)


REASONS: dict[str, dict[str, Any]] = {
    "incomplete": {"capture": "incomplete"},
    "cancelled": {"finish_reason": "cancelled"},
    "error": {"finish_reason": "error"},
    "policy": {"policy": "frozen"},
    "stale": {"policy_version": 2},
    "agent": {"agent": "checker"},
    "sampling": {"sampling": Sampling(temperature=0.0)},
    "grammar": {"sampling": Sampling(grammar='start: "yes" | "no"')},
    "logprobs": {"logprobs": np.array([-0.1, np.nan, -0.1, -0.1], np.float32)},
}


@pytest.mark.parametrize("reason", REASONS)
def test_call_that_must_not_teach_is_kept_and_counted_with_its_reason(reason: str) -> None:
    calls = [call("r/1", 0, tokens=5, policy_version=3), call("r/1", 1, **{"policy_version": 3, **REASONS[reason]})]
    trains = "writer".__eq__
    [made], report = trajectories_of(
        [rollout("r")], calls, [final("r")], policy="policy", trains=trains, oldest_version=3
    )
    assert [t.left_out for t in made.transitions] == [None, reason]
    assert (report.trained_calls, report.trained_tokens) == (1, 5)
    assert (report.left_out_calls, report.left_out_tokens) == ({reason: 1}, {reason: 4})


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=5)])
def test_shaped_sampling_is_left_out(sampling: Sampling) -> None:
    _, report = trajectories_of([rollout("r")], [call("r/1", 0, sampling=sampling)], [final("r")], policy="policy")
    assert report.left_out_tokens == {"sampling": 4}


def test_every_sampled_token_of_an_accepted_attempt_is_counted_once() -> None:
    rng = np.random.default_rng(0)
    rollouts = [rollout(f"r{i}") for i in range(40)]
    calls = [
        call(
            f"r{i}/{attempt}",
            index,
            tokens=4,
            replays="t/1/0" if index == 0 and i % 4 == 0 else None,
            **{"policy_version": 3, **(REASONS[rng.choice(list(REASONS))] if rng.random() < 0.5 else {})},
        )
        for i in range(40)
        for attempt in (1, 2)  # the first of two attempts is accepted
        for index in range(rng.integers(0, 4))
    ]
    rewards = [final(f"r{i}") for i in range(40)]
    made, report = trajectories_of(rollouts, calls, rewards, policy="policy", trains="writer".__eq__, oldest_version=3)
    accepted = sum(len(c.completion_ids) for c in calls if c.attempt_id.endswith("/1") and c.replays is None)
    assert report.trained_tokens + sum(report.left_out_tokens.values()) == accepted
    assert (
        report.trained_tokens
        == sum(len(t.completion_ids) for m in made for t in m.transitions if t.left_out is None)
        > 0
    )
    seen = [t.call_id for m in made for t in m.transitions]
    assert len(seen) == len(set(seen))
    assert sum(v for k, v in report.metrics().items() if k.startswith("tokens/")) == accepted


@pytest.mark.parametrize("reason", [{}, *REASONS.values()])
def test_a_played_back_call_is_left_out_and_its_tokens_count_nowhere(reason: dict[str, Any]) -> None:
    """It was sampled in the trunk, which is trained. `replayed` comes before all other reasons."""
    branch = Branch(attempt_id="t/1", call_id="t/1/1")
    calls = [call("r/1", 0, replays="t/1/0", **reason), call("r/1", 1, tokens=5, policy_version=3)]
    [made], report = trajectories_of(
        [rollout("r", branch=branch)], calls, [final("r")], policy="policy", trains="writer".__eq__, oldest_version=3
    )
    assert made.branch == branch
    assert [(t.replays, t.left_out) for t in made.transitions] == [("t/1/0", "replayed"), (None, None)]
    assert (report.trained_calls, report.trained_tokens) == (1, 5)
    assert (report.left_out_calls, report.left_out_tokens) == ({"replayed": 1}, {})
    assert {name for name in report.metrics() if name.startswith("tokens/")} == {"tokens/selected"}


def test_failed_rollout_is_excluded_and_not_worth_zero() -> None:
    rollouts = [rollout("a"), rollout("b", status="failed", accepted_attempt_id=None)]
    made, report = trajectories_of(
        rollouts, [call("a/1", 0), call("b/1", 0)], [final("a"), final("b", 0.0)], policy="policy"
    )
    assert [m.rollout_id for m in made] == ["a"]
    assert (report.succeeded, report.excluded, report.trained_tokens) == (1, 1, 4)


def test_rollout_whose_calls_are_all_left_out_is_still_a_member_of_its_group() -> None:
    [made], report = trajectories_of(
        [rollout("r")], [call("r/1", 0)], [final("r", 0.25)], policy="policy", trains=lambda agent: False
    )
    assert made.reward == 0.25
    assert report.trained_tokens == 0


def test_calls_come_in_the_order_they_were_made_with_what_was_recorded() -> None:
    calls = [call("r/1", 1, finish_reason="length"), call("r/1", 0)]
    [made], _ = trajectories_of([rollout("r")], calls, [final("r")], policy="policy")
    assert [t.call_id for t in made.transitions] == ["r/1/0", "r/1/1"]
    assert [t.truncated for t in made.transitions] == [False, True]
    assert made.transitions[0].temperature == 0.8
    assert made.transitions[0].prompt_ids is calls[1].prompt_ids


def test_step_rewards_belong_to_their_call_and_never_overwrite_the_final_one() -> None:
    rewards = [
        final("r", 0.5),
        final("r", 9.0, call_id="r/1/0"),
        final("r", 0.25, call_id="r/1/0", name="valid"),
        final("r", 7.0, name="style"),
    ]
    [made], _ = trajectories_of([rollout("r")], [call("r/1", 0), call("r/1", 1)], rewards, policy="policy")
    assert made.reward == 0.5
    assert [t.reward for t in made.transitions] == [9.25, None]


def test_of_several_final_rewards_the_graders_counts() -> None:
    rewards = [final("r", 0.0, source="agent"), final("r", 0.75), final("r", 0.1, source="air")]
    [made], _ = trajectories_of([rollout("r")], [], rewards, policy="policy")
    assert made.reward == 0.75


@pytest.mark.parametrize(
    "rewards", [[], [final("r"), final("r")], [final("r", source="agent"), final("r", source="agent")]]
)
def test_no_final_reward_or_an_ambiguous_one_is_an_error(rewards: list[Reward]) -> None:
    with pytest.raises(GraderError, match="needs one `final` reward"):
        trajectories_of([rollout("r")], [], rewards, policy="policy")
