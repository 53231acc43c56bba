"""How many tokens a rollout has, from recorded calls or by assumption."""

import numpy as np
import pytest

from lightningrl.errors import UserError
from lightningrl.estimate.workload import FOLLOW_UP, assumed, outside_calls, recorded
from lightningrl.types import Attempt, Call, Sampling


def call(attempt_id: str, index: int, prompt: list[int], completion: list[int], *, seconds: float = 1.0) -> Call:
    return Call(
        id=f"{attempt_id}/{index}",
        attempt_id=attempt_id,
        index=index,
        parent_call_id=None,
        agent="",
        policy="policy",
        policy_version=0,
        dialect="openai.chat",
        request={},
        response={},
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.zeros(len(completion), np.float32),
        sampling=Sampling(),
        finish_reason="stop",
        capture="rendered",
        started_at=10.0,
        ended_at=10.0 + seconds,
    )


def rollout(attempt_id: str, *, own: int) -> list[Call]:
    """Two calls: 100 tokens that all share, 5 sampled; then 10 tokens of a tool's result, 5 sampled."""
    first = [own] * 5
    return [
        call(attempt_id, 0, [1] * 100, first),
        call(attempt_id, 1, [1] * 100 + first + [own + 50] * 10, [own + 90] * 5),
    ]


def test_recorded_calls_are_merged_within_a_rollout_and_within_a_group() -> None:
    group = [*rollout("a", own=2), *rollout("b", own=3), *rollout("c", own=4)]
    work = recorded([group], agent_s=None, source="here")
    assert (work.calls, work.prompt_tokens, work.completion_tokens) == (2, 107.5, 5)
    assert (work.unique_tokens, work.shared_tokens) == (120, 100)
    assert work.unique_in(3) == 100 + 3 * 20
    assert work.unique_in(8) == 100 + 8 * 20


def test_rollouts_of_different_tasks_share_nothing() -> None:
    work = recorded([rollout("a", own=2), rollout("b", own=3)], agent_s=None, source="here")
    assert (work.unique_tokens, work.shared_tokens) == (120, 0)


def test_an_assumed_conversation_repeats_its_history() -> None:
    work = assumed(calls=3, prompt_tokens=800, completion_tokens=300, source="options")
    prompts = [800, 800 + 300 + FOLLOW_UP, 800 + 2 * (300 + FOLLOW_UP)]
    assert work.prompt_tokens == sum(prompts) / 3
    assert work.unique_tokens == prompts[-1] + 300
    assert work.unique_in(2) == 800 + 2 * (work.unique_tokens - 800)


def test_the_agents_own_time_is_what_its_calls_leave_over() -> None:
    attempts = [Attempt(id="a", rollout_id="r", number=1, token="", started_at=9.0, ended_at=13.0)]
    calls = [call("a", 0, [1], [2], seconds=1.5), call("a", 1, [1], [2], seconds=0.5)]
    assert outside_calls(attempts, calls, together=4) == pytest.approx((4.0 - 2.0) / 4)
    assert outside_calls([], [], together=4) is None


@pytest.mark.parametrize("calls", [1e300, float("inf"), float("nan")])
def test_numbers_without_bounds_are_refused(calls: float) -> None:
    with pytest.raises(UserError, match=r"calls: at most 1,000,000,000"):
        assumed(calls=calls, source="options")
