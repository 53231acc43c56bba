"""Records ⇄ rows: two functions for each kind of record. Those of calls and spans are in modules of their own."""

import hashlib
import math
import re
import secrets
from typing import Any, NamedTuple

import msgspec

from lightningrl.errors import StoreError
from lightningrl.store.connection import Connection
from lightningrl.store.lease import Moment
from lightningrl.types import Attempt, AttemptStatus, Branch, Reward, Rollout, Task, Weights

ROLLOUT = """
    id, group_id, task_id, task_input, split, status, max_attempts, timeout_s, sampling, accepted_attempt_id, labels,
    branch
"""
"""Columns of the view `whole_rollouts`."""
NEXT_CHANGE = "(SELECT coalesce(max(changed), 0) + 1 FROM rollouts)"
ENQUEUE = f"""
    INSERT INTO rollouts (id, group_id, task_id, input_id, split, status, max_attempts, timeout_s, sampling, labels,
        branch, changed)
    VALUES (?, ?, ?, (SELECT id FROM inputs WHERE digest = ?), ?, ?, ?, ?, ?, ?, ?, {NEXT_CHANGE})
    ON CONFLICT (id) DO UPDATE
    SET status = 'queued', max_attempts = rollouts.max_attempts + excluded.max_attempts, changed = excluded.changed
    WHERE rollouts.status = 'failed'
"""
STATUS = f"UPDATE rollouts SET status = ?, changed = {NEXT_CHANGE} WHERE id = ?"
ATTEMPT = "id, rollout_id, number, token, status, worker, lease_until, error, output, started_at, ended_at, gateway"
"""Columns of the view `whole_attempts`."""
BEGIN = """
    INSERT INTO attempts (rollout, number, token, status, worker, gateway, lease_until, boot, lease_ticks, started_at)
    VALUES ((SELECT seq FROM rollouts WHERE id = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

RUNNING = "SELECT id FROM whole_attempts WHERE status = 'running' AND worker = ? AND gateway = ?"
KEYS = "SELECT seq, status, token, ended_at, worker FROM whole_attempts WHERE rollout_id = ? AND number = ?"

TOKEN, SECRET = "lrl-", 18
"""The beginning of a token, and the number of random bytes that follow (as 24 characters)."""

NUMBER = re.compile("[1-9][0-9]{0,8}")


class AttemptKey(NamedTuple):
    """An attempt, as other rows refer to it."""

    seq: int
    """The number of its row."""
    status: AttemptStatus
    token: bytes
    """SHA-256 of its token."""
    ended_at: float | None
    """Unix seconds; None while it runs."""
    worker: str

    def runs(self, worker: str | None = None) -> bool:
        """Whether it is running, and is this worker's. None: any worker's."""
        return self.status == "running" and worker in (None, self.worker)


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
    """Text that UTF-8 can encode: a lone surrogate (e.g. from a file name) is written as an escape."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def input_row(task: Task) -> tuple[bytes, str]:
    """(digest, JSON)"""
    text = to_json(task.input)
    return hashlib.blake2b(text.encode(), digest_size=16).digest(), text


def rollout_row(rollout: Rollout, *, digest: bytes) -> tuple[Any, ...]:
    """The values of `ENQUEUE`."""
    task = rollout.task
    head = (rollout.id, rollout.group_id, task.id, digest, task.split)
    labels = to_json(rollout.labels) if rollout.labels else ""
    branch = None if rollout.branch is None else to_json((rollout.branch.attempt_id, rollout.branch.call_id))
    return (*head, rollout.status, rollout.max_attempts, rollout.timeout_s, to_json(rollout.sampling), labels, branch)


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
        labels=labels_of(row[10]),
        branch=branch_of(row[11]),
    )


def labels_of(text: str) -> tuple[str, ...]:
    return msgspec.json.decode(text, type=tuple[str, ...]) if text else ()


def branch_of(text: str | None) -> Branch | None:
    if text is None:
        return None
    attempt_id, call_id = msgspec.json.decode(text, type=tuple[str, str | None])
    return Branch(attempt_id=attempt_id, call_id=call_id)


def attempt_id(rollout_id: str, number: int) -> str:
    return f"{rollout_id}.{number}"


def attempt_key(attempt_id: str) -> tuple[str, int]:
    """(rollout id, number). The number is -1, which no attempt has, if this is not the id of an attempt."""
    rollout_id, _, number = attempt_id.rpartition(".")
    return rollout_id, int(number) if NUMBER.fullmatch(number) else -1


def find_attempt(connection: Connection, attempt_id: str) -> AttemptKey | None:
    """The keys of an attempt; None if there is no such attempt."""
    row = connection.execute(KEYS, attempt_key(attempt_id)).fetchone()
    return None if row is None else AttemptKey(*row)


def the_attempt(connection: Connection, attempt_id: str) -> AttemptKey:
    """As `find_attempt`, but raises `StoreError` if there is no such attempt."""
    found = find_attempt(connection, attempt_id)
    if found is None:
        raise StoreError(f"no attempt `{attempt_id}`")
    return found


def new_token() -> str:
    """A secret with 144 random bits."""
    return TOKEN + secrets.token_urlsafe(SECRET)


def attempt_row(attempt: Attempt, lease: Moment) -> tuple[Any, ...]:
    """The values of `BEGIN`."""
    head = (attempt.rollout_id, attempt.number, bytes.fromhex(attempt.token_hash), attempt.status)
    return (*head, attempt.worker, attempt.gateway, lease.now, lease.boot, lease.ticks, attempt.started_at)


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
        gateway=row[11],
    )


def reward_row(reward: Reward, *, attempt: int, call: int | None) -> tuple[Any, ...]:
    if not math.isfinite(reward.value):
        raise StoreError(f"reward `{reward.name}` is `{reward.value}`", hint="a reward is a finite number")
    return (attempt, call, reward.name, float(reward.value), reward.source)


def weights_of(row: tuple[Any, ...]) -> Weights:
    return Weights(policy=row[0], version=row[1], uri=row[2], kind=row[3])
