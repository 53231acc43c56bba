"""A run with branches, written with the store's own verbs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lightningrl.branches import DIFFERS, VOID
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Branch, Call, Reward, Rollout, Task
from tests.look.test_group import USER, said, turn

TRUNK = "train-00000-000-00"
OTHER = "train-00000-000-01"
AT_2 = [f"{TRUNK}-at02-{k}" for k in (1, 2)]
VOID_AT_3 = f"{TRUNK}-at03-1"
ALL = [TRUNK, OTHER, *AT_2, VOID_AT_3]
WHY = "message 2 (tool): `noon` was recorded, and `midnight` was sent"


def answers(attempt: Attempt, *texts: str, trunk: Sequence[Call] = ()) -> list[Call]:
    """Calls with these answers, one after the other. Those of `trunk` are played back."""
    messages: list[dict[str, Any]] = [USER]
    made: list[Call] = []
    for index, text in enumerate(texts):
        times = {"started_at": 1.0 + index, "ended_at": 1.5 + index}
        call = turn(attempt.id, index, messages, said(text), **times)
        recorded = trunk[index] if index < len(trunk) else None
        made.append(call if recorded is None else replace(call, replays=recorded.id, response=recorded.response))
        messages = [*messages, said(text), {"role": "user", "content": f"after {text}"}]
    return made


async def branched_run(folder: Path) -> Path:
    """A task, tried twice. The first try, with the answers `a b c`, is branched at its second call: one branch answers
    `B`, one `b` again. A third branch is void: its agent sent another second request than the trunk's.

    rollout        answers       reward
    TRUNK          a  b  c       1
    OTHER          x             0
    AT_2[0]        a' B          0         a': played back
    AT_2[1]        a' b  C       1
    VOID_AT_3      a' -
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = await SQLiteStore.open(folder / "store.sqlite")
    task = Task(id="t7", input={"question": "who?"}, split="train")
    await store.enqueue([Rollout(id=name, group_id="g", task=task) for name in (TRUNK, OTHER)])
    [(_, trunk), (_, other)] = await store.claim("w", limit=2, lease_s=60)
    recorded = answers(trunk, "a", "b", "c")
    await store.append(*recorded, *answers(other, "x"))
    for attempt, reward in ((trunk, 1.0), (other, 0.0)):
        await store.finish(attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=reward)])
    places = dict.fromkeys(AT_2, recorded[1]) | {VOID_AT_3: recorded[2]}
    for name, call in places.items():
        branch = Branch(attempt_id=trunk.id, call_id=call.id)
        await store.enqueue([Rollout(id=name, group_id="g", task=task, branch=branch)])
    [(_, first), (_, second), (_, void)] = await store.claim("w", limit=3, lease_s=60)
    await store.append(*answers(first, "a", "B", trunk=recorded[:1]))
    await store.append(*answers(second, "a", "b", "C", trunk=recorded[:1]))
    played, refused = answers(void, "a", "", trunk=recorded[:1])
    nothing = {"completion_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32), "response": {}}
    refused = replace(refused, capture="incomplete", capture_reason=DIFFERS + WHY, finish_reason="error", **nothing)
    await store.append(played, refused)
    for attempt, reward in ((first, 0.0), (second, 1.0)):
        await store.finish(attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=reward)])
    await store.finish(void.id, "failed", error=f"{VOID}call 2 {DIFFERS}{WHY}")
    await store.close()
    return folder
