"""Calls ⇄ rows. How does one call become one row?

A turn repeats nearly all of the turn before, so a row holds only what is new. Two turns of an attempt `r7.1`:

    call r7.1/0   prompt [1 2 3]             sampled [7 8 9]
                  request {"model":"m","messages":[{"role":"user","content":"say a word"}]}
    call r7.1/1   prompt [1 2 3 7 8 9 4 5]   sampled [6 9]     parent r7.1/0, `bridged`
                  request {"model":"m","messages":[{"role":"user","content":"say a word"},…]}, two messages more

1. `recent` chooses the base of the call: an earlier call to write it as a difference to. Here that is its parent.
2. `delta` writes ids, logprobs, request and response as that difference.
3. All fields that many calls share become one row of `kinds`: agent, policy, dialect, finish reason, capture, sampling
   (but for `seed` and `max_tokens`), and the pattern of the call's id, here `{attempt}/{index}`.
4. `row_of` puts both together with the other numbers. Row 2 of `calls`, which is call r7.1/1:

    attempt 1    idx 1        row of the attempt, and the call's index in it
    kind 2       id NULL      row of its kind; the id follows from the pattern of the kind
    base 1       continues 1  row of its base, which is also its parent
    shared 6     ids [4 5 6 9]              the first 6 ids are the base's
    head 63      tail 2       the first 63 bytes and the last 2 of the request are the base's
    blocks NULL  body BLOB    the two new messages, the response and a part of the logprobs, compressed
    logprobs BLOB             the other bytes of the logprobs

`read_calls` goes the other way, from base to base.
"""

import math
import struct
from collections.abc import Hashable, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np

from lightningrl.errors import StoreError
from lightningrl.store import delta
from lightningrl.store.connection import Connection
from lightningrl.store.delta import NOTHING, Block, Content, Delta
from lightningrl.store.rows import clean, find_attempt, to_json, to_json_bytes
from lightningrl.types import Call, Floats, Reward, Sampling

COLUMNS = """
    attempt, idx, kind, id, base, continues, shared, ids, logprobs, head, tail, blocks, body,
    policy_version, max_tokens, seed, capture_reason, started_at, ended_at, request_id, replays
"""
_VALUES = f"SELECT {', '.join('?' * 21)} FROM attempts WHERE seq = ? AND status = 'running'"
INSERT = f"INSERT INTO calls ({COLUMNS}) {_VALUES}"
"""Inserts nothing if the attempt does not run."""
NUMBERED = f"INSERT INTO calls (seq, {COLUMNS}) {_VALUES.replace('?', '?, ?', 1)}"
"""The same, with the number of the row before the other values."""

CONTENT = "base, shared, ids, logprobs, head, tail, blocks, body"

WHOLE = f"""
    SELECT seq, {CONTENT}, calls.id, idx, continues, policy_version, max_tokens, seed, capture_reason, started_at,
        ended_at, request_id, replays, name, agent, policy, dialect, finish_reason, capture, sampling
    FROM calls JOIN kinds ON kinds.id = calls.kind WHERE attempt = ?
"""

ATTEMPT, INDEX = "\1", "\2"
"""Placeholders in the name of a kind, for the attempt's id and the call's index."""

SHARED = tuple(field.name for field in fields(Sampling) if field.name not in ("seed", "max_tokens"))
"""The settings of sampling that many calls share."""
_shared_settings = attrgetter(*SHARED)


def name_of(call: Call) -> str:
    """The pattern of the call's id, with placeholders. Empty if the id does not follow from attempt and index."""
    end = str(call.index)
    if not call.id.endswith(end):
        return ""
    name = call.id[: -len(end)].replace(call.attempt_id, ATTEMPT) + INDEX
    return name if ATTEMPT in name and _id_of(name, call.attempt_id, call.index) == call.id else ""


def _id_of(name: str, attempt_id: str, index: int) -> str:
    return name.replace(INDEX, str(index)).replace(ATTEMPT, attempt_id)


def kind_key(call: Call, name: str) -> tuple[Hashable, ...]:
    """Equal for calls of one kind."""
    return (
        name,
        call.agent,
        call.policy,
        call.dialect,
        call.finish_reason,
        call.capture,
        _shared_settings(call.sampling),
    )


def add_kind(connection: Connection, call: Call, name: str) -> int:
    """The row of a call's kind. It is added if it is new."""
    sampling = dict(zip(SHARED, _shared_settings(call.sampling), strict=True))
    row = (name, call.agent, call.policy, call.dialect, call.finish_reason, call.capture, to_json(sampling))
    columns = "name, agent, policy, dialect, finish_reason, capture, sampling"
    connection.execute(f"INSERT INTO kinds ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row)
    return connection.execute(f"SELECT id FROM kinds WHERE ({columns}) = (?, ?, ?, ?, ?, ?, ?)", row).fetchone()[0]


def check(call: Call) -> None:
    """Raises `StoreError` for a call that contradicts itself."""
    if len(call.completion_ids) != len(call.logprobs):
        sampled, logprobs = len(call.completion_ids), len(call.logprobs)
        raise StoreError(f"call `{call.id}` has `{sampled}` sampled tokens and `{logprobs}` logprobs")
    if call.capture != "incomplete" and not math.isfinite(call.logprobs.sum(dtype=np.float64)):
        hint = "record it as `incomplete`, which is never trained"
        raise StoreError(f"call `{call.id}` has a logprob that is not finite", hint=hint)
    if not (math.isfinite(call.sampling.temperature) and math.isfinite(call.sampling.top_p)):
        raise StoreError(f"call `{call.id}` was sampled under `{call.sampling}`, which is not finite")


def content_of(call: Call, request: bytes, *, base: Content) -> Content:
    """The call as a base of later calls."""
    ids = np.concatenate((call.prompt_ids, call.completion_ids), dtype=np.int32)
    return Content(ids=ids, request=request, response=to_json_bytes(call.response), depth=base.depth + 1)


def row_of(
    call: Call, written: Delta, *, attempt: int, kind: int, named: bool, base: int | None, short_times: bool
) -> tuple[Any, ...]:
    """The values of `INSERT`. `named`: the id follows from the name of the kind. `short_times`: the column `ended_at`
    can hold an integer, which is half as long.
    """
    sampling = call.sampling
    blocks = to_json(written.blocks) if written.blocks else None
    lasted = _bits(call.ended_at) - _bits(call.started_at)
    seed = sampling.seed if sampling.seed is None or -(2**63) <= sampling.seed < 2**63 else str(sampling.seed)
    ended_at = lasted if short_times and abs(lasted) < 2**31 else call.ended_at
    return (
        *(attempt, call.index, kind, None if named else call.id, base, call.parent_call_id is not None),
        *(written.shared, written.ids, written.logprobs, written.head, written.tail, blocks, written.body),
        *(call.policy_version, sampling.max_tokens, seed, clean(call.capture_reason), call.started_at, ended_at),
        *(clean(call.request_id) or None, call.replays, attempt),
    )


def _bits(number: float) -> int:
    """The rank of a number among all float64 numbers: the next larger number has the next larger rank."""
    return _INT64.unpack(_FLOAT64.pack(number))[0]


def _float(bits: int) -> float:
    return _FLOAT64.unpack(_INT64.pack(bits))[0]


_FLOAT64, _INT64 = struct.Struct("<d"), struct.Struct("<q")


def read_ids(connection: Connection, attempt: int, attempt_id: str) -> dict[int, str]:
    """{row: call id} of an attempt's calls, in the order they were stored."""
    statement = (
        "SELECT calls.id, name, idx, seq FROM calls JOIN kinds ON kinds.id = kind WHERE attempt = ? ORDER BY seq"
    )
    found = connection.execute(statement, (attempt,))
    return {seq: call_id or _id_of(name, attempt_id, index) for call_id, name, index, seq in found}


def read_content(connection: Connection, seq: int, known: dict[int, Content]) -> Content:
    """One call as a base. The call, and all bases behind it, are added to `known`."""
    rows: list[tuple[int, tuple[Any, ...]]] = []
    behind: int | None = seq
    while behind is not None and behind not in known:
        row = connection.execute(f"SELECT {CONTENT} FROM calls WHERE seq = ?", (behind,)).fetchone()
        rows.append((behind, row))
        behind = row[0]
    for number, row in reversed(rows):
        known[number], _ = _content_of(row, known)
    return known[seq]


def read_calls(connection: Connection, attempt_ids: Sequence[str]) -> list[Call]:
    """The calls of these attempts, by index."""
    roots: dict[int, Content] = {}
    return [call for attempt_id in attempt_ids for call in _read_attempt(connection, attempt_id, roots)]


def _read_attempt(connection: Connection, attempt_id: str, roots: dict[int, Content]) -> list[Call]:
    """`roots`: calls of other attempts that are bases here. It is shared by all attempts that are read."""
    attempt = find_attempt(connection, attempt_id)
    if attempt is None:
        return []
    known: dict[int, Content] = {}
    ids: dict[int, str] = {}
    calls: list[Call] = []
    stored = sorted(connection.execute(WHOLE, (attempt.seq,)), key=itemgetter(0))
    for row in stored:  # a base was stored before all calls that build on it
        base = row[1]
        if base is not None and base not in known:
            known[base] = read_content(connection, base, roots)
        known[row[0]], logprobs = _content_of(row[1:9], known)
        calls.append(_call_of(row, known[row[0]], logprobs, attempt_id=attempt_id, ids=ids))
    return sorted(calls, key=lambda call: call.index)


def read_rewards(connection: Connection, attempt_id: str) -> list[Reward]:
    """The rewards of an attempt, in the order they were stored."""
    attempt = find_attempt(connection, attempt_id)
    if attempt is None:
        return []
    statement = "SELECT call, name, value, source FROM rewards WHERE attempt = ? ORDER BY seq"
    found = connection.execute(statement, (attempt.seq,)).fetchall()
    ids: dict[int | None, str | None] = {None: None}
    if any(row[0] is not None for row in found):
        ids |= read_ids(connection, attempt.seq, attempt_id)
    return [
        Reward(attempt_id=attempt_id, call_id=ids[call], name=name, value=value, source=source)
        for call, name, value, source in found
    ]


def _content_of(row: tuple[Any, ...], known: dict[int, Content]) -> tuple[Content, Floats]:
    base, shared, ids, logprobs, head, tail, blocks, body = row
    written = Delta(
        shared=shared, ids=ids, logprobs=logprobs, head=head, tail=tail, blocks=blocks_of(blocks), body=body
    )
    return delta.read(written, NOTHING if base is None else known[base])


def blocks_of(column: str | None) -> tuple[Block, ...]:
    return () if column is None else msgspec.json.decode(column, type=tuple[Block, ...])


def _call_of(row: tuple[Any, ...], content: Content, logprobs: Floats, *, attempt_id: str, ids: dict[int, str]) -> Call:
    """`ids`: {row: call id} of the attempt's calls. This call is added."""
    seq, base, call_id, index, continues = row[0], row[1], *row[9:12]
    policy_version, max_tokens, seed, capture_reason, started_at, ended_at, request_id, replays = row[12:20]
    name, agent, policy, dialect, finish_reason, capture, sampling = row[20:]
    ids[seq] = call_id or _id_of(name, attempt_id, index)
    prompt_length = len(content.ids) - len(logprobs)
    return Call(
        id=ids[seq],
        attempt_id=attempt_id,
        index=index,
        parent_call_id=ids[base] if continues else None,
        agent=agent,
        policy=policy,
        policy_version=policy_version,
        dialect=dialect,
        request=msgspec.json.decode(content.request),
        response=msgspec.json.decode(content.response),
        prompt_ids=content.ids[:prompt_length],
        completion_ids=content.ids[prompt_length:],
        logprobs=logprobs,
        sampling=_sampling_of(sampling, max_tokens=max_tokens, seed=seed),
        finish_reason=finish_reason,
        capture=capture,
        capture_reason=capture_reason,
        started_at=started_at,
        ended_at=ended_at if isinstance(ended_at, float) else _float(_bits(started_at) + ended_at),
        request_id=request_id or "",
        replays=replays,
    )


def _sampling_of(shape: str, *, max_tokens: int | None, seed: int | str | None) -> Sampling:
    """Rows of the first schema have all settings in `shape`."""
    known = msgspec.json.decode(shape)
    if max_tokens is not None:
        known |= {"max_tokens": max_tokens, "seed": None if seed is None else int(seed)}
    return msgspec.convert(known, Sampling)
