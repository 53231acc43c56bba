"""Records ⇄ rows: one pair of functions for each noun; those of a call are in `calls`."""

import hashlib
import math
import re
import secrets
from typing import Any

import msgspec

from lightningrl.errors import StoreError
from lightningrl.store.lease import Moment
from lightningrl.types import Attempt, Reward, Rollout, Task, Weights

ROLLOUT = "id, group_id, task_id, task_input, split, status, max_attempts, timeout_s, sampling, accepted_attempt_id"
"""As the view `whole_rollouts` has them."""
NEXT_CHANGE = "(SELECT ifnull(max(changed), 0) + 1 FROM rollouts)"
ENQUEUE = f"""
    INSERT INTO rollouts (id, group_id, task_id, input_id, split, status, max_attempts, timeout_s, sampling, changed)
    VALUES (?, ?, ?, (SELECT id FROM inputs WHERE digest = ?), ?, ?, ?, ?, ?, {NEXT_CHANGE})
    ON CONFLICT (id) DO UPDATE
    SET status = 'queued', max_attempts = max_attempts + excluded.max_attempts, changed = excluded.changed WHERE status = 'failed'
"""
STATUS = f"UPDATE rollouts SET status = ?, changed = {NEXT_CHANGE} WHERE id = ?"
ATTEMPT = "id, rollout_id, number, token, status, worker, lease_until, error, output, started_at, ended_at"
"""As the view `whole_attempts` has them."""
BEGIN = """
    INSERT INTO attempts (rollout, number, token, status, worker, lease_until, boot, lease_ticks, started_at)
    VALUES ((SELECT seq FROM rollouts WHERE id = ?), ?, ?, ?, ?, ?, ?, ?, ?)
"""

TOKEN, SECRET = "lrl-", 18
"""What a token begins with, and the bytes of chance that follow (as 24 characters)."""

NUMBER = re.compile("[1-9][0-9]{0,8}")


def to_json(value: object) -> str:
    return to_json_bytes(value).decode()


def to_json_bytes(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"`{type(value).__name__}` cannot be kept as JSON: {error}",
            hint="use dicts, lists, strings, numbers, booleans and null",
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
    return (*head, rollout.status, rollout.max_attempts, rollout.timeout_s, to_json(rollout.sampling))


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


def attempt_id(rollout_id: str, number: int) -> str:
    return f"{rollout_id}.{number}"


def attempt_key(attempt_id: str) -> tuple[str, int]:
    """(rollout id, number); a number that none has if it is not the id of an attempt."""
    rollout_id, _, number = attempt_id.rpartition(".")
    return rollout_id, int(number) if NUMBER.fullmatch(number) else -1


def new_token() -> str:
    """A secret of 144 bits."""
    return TOKEN + secrets.token_urlsafe(SECRET)


def attempt_row(attempt: Attempt, lease: Moment) -> tuple[Any, ...]:
    """What `BEGIN` takes."""
    head = (attempt.rollout_id, attempt.number, bytes.fromhex(attempt.token_hash), attempt.status, attempt.worker)
    return (*head, lease.now, lease.boot, lease.ticks, attempt.started_at)


def attempt_of(row: tuple[Any, ...]) -> Attempt:
    return Attempt(
        id=row[0],
        rollout_id=row[1],
        number=row[2],
        token="",
        token_hash=row[3].hex(),
        status=row[4],
        worker=row[5],
        lease_until=row[6],
        error=row[7],
        output=msgspec.json.decode(row[8]) if row[8] is not None else None,
        started_at=row[9],
        ended_at=row[10],
    )


def reward_row(reward: Reward, *, attempt: int, call: int | None) -> tuple[Any, ...]:
    if not math.isfinite(reward.value):
        raise StoreError(f"reward `{reward.name}` is `{reward.value}`", hint="a reward is a finite number")
    return (attempt, call, reward.name, float(reward.value), reward.source)


def weights_of(row: tuple[Any, ...]) -> Weights:
    return Weights(policy=row[0], version=row[1], uri=row[2], kind=row[3])
