"""Records ⇄ rows: one pair of functions for each noun. Token ids are little-endian int32, logprobs float32, JSON is text."""

import hashlib
import math
import sqlite3
from typing import Any

import msgspec
import numpy as np

from lightningrl.errors import StoreError
from lightningrl.types import Attempt, Call, Floats, Ints, Reward, Rollout, Sampling, Task, Weights

ROLLOUT = "id, group_id, task_id, task_input, split, status, max_attempts, timeout_s, sampling, accepted_attempt_id"
"""As the view `whole_rollouts` has them."""
ENQUEUE = """
    INSERT INTO rollouts (id, group_id, task_id, input_id, split, status, max_attempts, timeout_s, sampling, accepted_attempt_id)
    VALUES (?, ?, ?, (SELECT id FROM inputs WHERE digest = ?), ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET status = 'queued', max_attempts = max_attempts + excluded.max_attempts WHERE status = 'failed'
"""
ATTEMPT = "id, rollout_id, number, token, status, worker, lease_until, error, output, started_at, ended_at"
CALL = (
    "id, attempt_id, idx, parent_call_id, agent, policy, policy_version, dialect, request, response, base_call_id, shared, prompt_delta,"
    " completion_ids, logprobs, sampling, finish_reason, capture, capture_reason, started_at, ended_at"
)
REWARD = "attempt_id, call_id, name, value, source"


def slots(columns: str) -> str:
    """`?, ?, …` for a list of columns."""
    return ", ".join("?" for _ in columns.split(","))


def to_json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"`{type(value).__name__}` cannot be kept as JSON: {error}", hint="use dicts, lists, strings, numbers, booleans and null"
        ) from error


def clean(text: str | None) -> str | None:
    """Text as UTF-8 can hold it: a lone surrogate (from a file name, say) is spelled out."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def input_row(task: Task) -> tuple[bytes, str]:
    """(digest, JSON)"""
    text = to_json(task.input)
    return hashlib.blake2b(text.encode(), digest_size=16).digest(), text


def rollout_row(rollout: Rollout, *, digest: bytes) -> tuple[Any, ...]:
    """What `ENQUEUE` takes."""
    task = rollout.task
    head = (rollout.id, rollout.group_id, task.id, digest, task.split)
    return (*head, rollout.status, rollout.max_attempts, rollout.timeout_s, to_json(rollout.sampling), rollout.accepted_attempt_id)


def rollout_of(row: tuple[Any, ...]) -> Rollout:
    return Rollout(
        id=row[0],
        group_id=row[1],
        task=Task(id=row[2], input=msgspec.json.decode(row[3]), split=row[4]),
        status=row[5],
        max_attempts=row[6],
        timeout_s=row[7],
        sampling=msgspec.json.decode(row[8]),
        accepted_attempt_id=row[9],
    )


def attempt_row(attempt: Attempt) -> tuple[Any, ...]:
    head = (attempt.id, attempt.rollout_id, attempt.number, attempt.token, attempt.status, attempt.worker, attempt.lease_until)
    return (*head, clean(attempt.error), to_json(attempt.output), attempt.started_at, attempt.ended_at)


def attempt_of(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        id=row[0],
        rollout_id=row[1],
        number=row[2],
        token=row[3],
        status=row[4],
        worker=row[5],
        lease_until=row[6],
        error=row[7],
        output=msgspec.json.decode(row[8]) if row[8] is not None else None,
        started_at=row[9],
        ended_at=row[10],
    )


def call_row(call: Call, *, base_call_id: str | None, shared: int) -> tuple[Any, ...]:
    if len(call.completion_ids) != len(call.logprobs):
        raise StoreError(f"call `{call.id}` has `{len(call.completion_ids)}` sampled tokens and `{len(call.logprobs)}` logprobs")
    if call.capture != "incomplete" and not np.isfinite(call.logprobs).all():
        raise StoreError(f"call `{call.id}` has a logprob that is not finite", hint="record it as `incomplete`, which is never trained")
    return (
        *(call.id, call.attempt_id, call.index, call.parent_call_id, call.agent, call.policy, call.policy_version, call.dialect),
        *(to_json(call.request), to_json(call.response), base_call_id, shared),
        *(np.asarray(call.prompt_ids[shared:], "<i4").tobytes(), np.asarray(call.completion_ids, "<i4").tobytes()),
        *(np.asarray(call.logprobs, "<f4").tobytes(), to_json(call.sampling), call.finish_reason),
        *(call.capture, clean(call.capture_reason), call.started_at, call.ended_at),
    )


def call_of(row: tuple[Any, ...], *, prompt_ids: Ints) -> Call:
    return Call(
        id=row[0],
        attempt_id=row[1],
        index=row[2],
        parent_call_id=row[3],
        agent=row[4],
        policy=row[5],
        policy_version=row[6],
        dialect=row[7],
        request=msgspec.json.decode(row[8]),
        response=msgspec.json.decode(row[9]),
        prompt_ids=prompt_ids,
        completion_ids=ints(row[13]),
        logprobs=floats(row[14]),
        sampling=msgspec.json.decode(row[15], type=Sampling),
        finish_reason=row[16],
        capture=row[17],
        capture_reason=row[18],
        started_at=row[19],
        ended_at=row[20],
    )


def reward_row(reward: Reward) -> tuple[Any, ...]:
    if not math.isfinite(reward.value):
        raise StoreError(f"reward `{reward.name}` is `{reward.value}`", hint="a reward is a finite number")
    return (reward.attempt_id, reward.call_id, reward.name, float(reward.value), reward.source)


def reward_of(row: tuple[Any, ...]) -> Reward:
    return Reward(attempt_id=row[0], call_id=row[1], name=row[2], value=row[3], source=row[4])


def weights_of(row: tuple[Any, ...]) -> Weights:
    return Weights(policy=row[0], version=row[1], uri=row[2], kind=row[3])


def ints(blob: bytes) -> Ints:
    return np.frombuffer(blob, "<i4")


def floats(blob: bytes) -> Floats:
    return np.frombuffer(blob, "<f4")


def read_calls(connection: sqlite3.Connection, attempt_id: str) -> list[Call]:
    """One attempt's calls, prompts put together again, by index. A base was always stored before what builds on it."""
    whole: dict[str, Ints] = {}
    calls: list[Call] = []
    for row in connection.execute(f"SELECT {CALL} FROM calls WHERE attempt_id = ? ORDER BY seq", (attempt_id,)):
        base_call_id, shared, delta = row[10], row[11], ints(row[12])
        prompt_ids = np.concatenate((whole[base_call_id][:shared], delta)) if shared else delta
        call = call_of(row, prompt_ids=prompt_ids)
        whole[call.id] = np.concatenate((prompt_ids, call.completion_ids))
        calls.append(call)
    return sorted(calls, key=lambda call: call.index)
