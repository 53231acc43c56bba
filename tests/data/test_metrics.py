"""Do the counts of a batch say what the engine did, also when a part of it was played back?"""

from typing import Any

import numpy as np

from lightningrl.data.metrics import batch_metrics, fork_metrics, void_attempts
from lightningrl.types import Attempt, Branch, Call, Reward, Rollout, Sampling, Task

BRANCH = Branch(attempt_id="t.1", call_id="t.1/1")


def rollout(name: str, *, branch: Branch | None = None, failed: bool = False) -> Rollout:
    task, accepted = Task(id="t", input={}, split="train"), None if failed else f"{name}.1"
    status = "failed" if failed else "succeeded"
    return Rollout(id=name, group_id="g", task=task, status=status, accepted_attempt_id=accepted, branch=branch)


def call(attempt_id: str, index: int, *, tokens: int, **changes: Any) -> Call:
    return Call(
        **{
            "id": f"{attempt_id}/{index}",
            "attempt_id": attempt_id,
            "index": index,
            "parent_call_id": None,
            "agent": "writer",
            "policy": "policy",
            "policy_version": 2,
            "dialect": "openai.chat",
            "request": {},
            "response": {},
            "prompt_ids": np.arange(3, dtype=np.int32),
            "completion_ids": np.arange(tokens, dtype=np.int32),
            "logprobs": np.full(tokens, -0.5, np.float32),
            "sampling": Sampling(),
            "finish_reason": "length",
            "capture": "bridged",
            **changes,
        }
    )


def attempt(rollout_id: str, number: int, error: str | None) -> Attempt:
    status = "succeeded" if error is None else "failed"
    return Attempt(
        id=f"{rollout_id}.{number}", rollout_id=rollout_id, number=number, token="", status=status, error=error
    )


TRUNK = [call("t.1", 0, tokens=4), call("t.1", 1, tokens=6)]


def test_played_back_calls_are_counted_once_in_their_trunk() -> None:
    played = call("b.1", 0, tokens=4, replays="t.1/0")
    calls = [*TRUNK, played, call("b.1", 1, tokens=2)]
    rewards = [Reward(attempt_id="t.1", value=1.0), Reward(attempt_id="b.1", value=0.0)]
    found = batch_metrics([rollout("t"), rollout("b", branch=BRANCH)], calls, rewards, heldout=frozenset())
    assert (found["tokens/sampled"], found["tokens/per_call"]) == (12.0, 4.0)
    assert (found["calls/bridged"], found["calls/truncated"], found["calls/per_rollout"]) == (3.0, 3.0, 2.0)
    assert found["reward/mean"] == 0.5
    alone = batch_metrics([rollout("b", branch=BRANCH)], [played], rewards[1:], heldout=frozenset())
    assert (alone["tokens/sampled"], alone["tokens/per_call"]) == (0.0, 0.0)


def test_a_step_without_branches_has_no_metrics_of_branches() -> None:
    assert fork_metrics([rollout("t"), rollout("f", failed=True)], TRUNK, []) == {}


def test_void_branches_are_counted_by_their_latest_attempt() -> None:
    """A rollout is tried again after a void attempt; what it ends with counts."""
    void = [
        *(attempt("a", 1, "void: it ended after 1 recorded calls"), attempt("a", 2, "AgentError: no")),
        *(attempt("b", 1, "AgentError: no"), attempt("b", 2, "void: call 2 differs from the record: a clock")),
        *(attempt("c", 1, "GraderError: void: no"), attempt("d", 1, None)),
    ]
    assert [found.id for found in void_attempts(void)] == ["b.2"]
    batch = [rollout("t"), rollout("f", failed=True), rollout("s", branch=BRANCH)]
    batch += [rollout(name, branch=BRANCH, failed=True) for name in "abc"]
    calls = [*TRUNK, call("s.1", 0, tokens=4, replays="t.1/0"), call("s.1", 1, tokens=2)]
    found = fork_metrics(batch, calls, void_attempts(void))
    assert found == {"forks/branches": 4.0, "forks/void": 1.0, "tokens/replayed": 4.0}
