"""Small records for the checks and tests of stores. Their numbers are easy to follow."""

from collections.abc import Awaitable, Sequence

import numpy as np

from lightningrl.errors import StoreError
from lightningrl.store.base import Store
from lightningrl.types import Attempt, Call, Capture, Rollout, Sampling, Task


def rollout(rollout_id: str, *, group_id: str = "g", max_attempts: int = 1) -> Rollout:
    task = Task(id="t", input={"question": "wie groß?", "n": 1}, split="train")
    sampling = {"temperature": 0.0}
    return Rollout(id=rollout_id, group_id=group_id, task=task, max_attempts=max_attempts, sampling=sampling)


def call(
    attempt: Attempt,
    index: int,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    parent: str | None = None,
    capture: Capture = "rendered",
    logprob: float = -0.1,
) -> Call:
    """A call whose numbers are easy to follow."""
    return Call(
        id=f"{attempt.id}/{index}",
        attempt_id=attempt.id,
        index=index,
        parent_call_id=parent,
        agent="writer",
        policy="policy",
        policy_version=3,
        dialect="openai.chat",
        request={"messages": [{"role": "user", "content": "naïve"}]},
        response={"choices": [None, True, 1.5]},
        prompt_ids=np.array(prompt_ids, np.int32),
        completion_ids=np.array(completion_ids, np.int32),
        logprobs=np.full(len(completion_ids), logprob, np.float32),
        sampling=Sampling(temperature=0.7, stop=(";",), stop_token_ids=(2,), seed=7),
        finish_reason="stop",
        capture=capture,
        started_at=1.5,
        ended_at=2.5,
    )


async def begin(store: Store, rollout_id: str = "r") -> Attempt:
    """Enqueue one rollout and claim it."""
    await store.enqueue([rollout(rollout_id)])
    [(_, attempt)] = await store.claim("w", limit=1, lease_s=60)
    return attempt


async def refuses(work: Awaitable[object]) -> None:
    """Assert that `work` raises `StoreError`."""
    try:
        await work
    except StoreError:
        return
    raise AssertionError("expected a StoreError")


def same(one: Call, other: Call) -> bool:
    """Equal in every field, arrays bit for bit."""
    for name in Call.__dataclass_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            equal = np.array_equal(mine, theirs, equal_nan=name == "logprobs")
        else:
            equal = mine == theirs
        if not equal:
            return False
    return True
