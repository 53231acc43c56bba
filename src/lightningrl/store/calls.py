"""Calls ⇄ rows: what `delta` makes of a call, beside what it has in common with others (`kinds`), in one row of
numbers.
"""

import math
import sqlite3
import struct
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import numpy as np

from lightningrl.errors import StoreError
from lightningrl.store import delta
from lightningrl.store.delta import NOTHING, Block, Delta, Said
from lightningrl.store.rows import attempt_key, clean, to_json, to_json_bytes
from lightningrl.types import Call, Floats, Reward, Sampling

INSERT = """
    INSERT INTO calls (attempt, idx, kind, id, base, continues, shared, ids, logprobs, head, tail, blocks, body,
        policy_version, max_tokens, seed, capture_reason, started_at, ended_at)
    SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? FROM attempts WHERE seq = ? AND status = 'running'
"""
"""Adds nothing if the attempt does not run."""

ATTEMPT_SEQ = "SELECT seq FROM whole_attempts WHERE rollout_id = ? AND number = ?"

SAID = "base, shared, ids, logprobs, head, tail, blocks, body"

WHOLE = f"""
    SELECT seq, {SAID}, calls.id, idx, continues, policy_version, max_tokens, seed, capture_reason, started_at, ended_at,
        name, agent, policy, dialect, finish_reason, capture, sampling
    FROM calls JOIN kinds ON kinds.id = calls.kind WHERE attempt = ?
"""

ATTEMPT, INDEX = "\1", "\2"
"""What stands in the name of a kind for the attempt's id and the call's index."""

_SHAPE = attrgetter(*(field.name for field in fields(Sampling) if field.name not in ("seed", "max_tokens")))
"""Of a call's sampling, what many calls have in common."""


def name_of(call: Call) -> str:
    """The call's id, with the attempt's id and the call's index left open; empty if the id does not follow from them."""
    end = str(call.index)
    if not call.id.endswith(end):
        return ""
    name = call.id[: -len(end)].replace(call.attempt_id, ATTEMPT) + INDEX
    return name if ATTEMPT in name and _id_of(name, call.attempt_id, call.index) == call.id else ""


def _id_of(name: str, attempt_id: str, index: int) -> str:
    return name.replace(INDEX, str(index)).replace(ATTEMPT, attempt_id)


def kind_key(call: Call, name: str) -> tuple[Hashable, ...]:
    """Equal for calls of one kind."""
    return (name, call.agent, call.policy, call.dialect, call.finish_reason, call.capture, _SHAPE(call.sampling))


def add_kind(connection: sqlite3.Connection, call: Call, name: str) -> int:
    """The row of a call's kind, a new one if need be."""
    sampling = {
        field.name: getattr(call.sampling, field.name)
        for field in fields(Sampling)
        if field.name not in ("seed", "max_tokens")
    }
    row = (name, call.agent, call.policy, call.dialect, call.finish_reason, call.capture, to_json(sampling))
    columns = "name, agent, policy, dialect, finish_reason, capture, sampling"
    connection.execute(f"INSERT INTO kinds ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", row)
    return connection.execute(f"SELECT id FROM kinds WHERE ({columns}) = (?, ?, ?, ?, ?, ?, ?)", row).fetchone()[0]


def attempt_seq(connection: sqlite3.Connection, attempt_id: str) -> int:
    """The row of an attempt. Raises `StoreError` if there is none."""
    for (seq,) in connection.execute(ATTEMPT_SEQ, attempt_key(attempt_id)):
        return seq
    raise StoreError(f"no attempt `{attempt_id}`")


def check(call: Call) -> None:
    """Raises `StoreError` for a call that contradicts itself."""
    if len(call.completion_ids) != len(call.logprobs):
        raise StoreError(
            f"call `{call.id}` has `{len(call.completion_ids)}` sampled tokens and `{len(call.logprobs)}` logprobs"
        )
    if call.capture != "incomplete" and not math.isfinite(call.logprobs.sum(dtype=np.float64)):
        raise StoreError(
            f"call `{call.id}` has a logprob that is not finite",
            hint="record it as `incomplete`, which is never trained",
        )
    if not (math.isfinite(call.sampling.temperature) and math.isfinite(call.sampling.top_p)):
        raise StoreError(f"call `{call.id}` was sampled under `{call.sampling}`, which is not finite")


def said_by(call: Call, request: bytes, *, base: Said) -> Said:
    """What later calls may build upon."""
    ids = np.concatenate((call.prompt_ids, call.completion_ids), dtype=np.int32)
    return Said(ids=ids, request=request, response=to_json_bytes(call.response), depth=base.depth + 1)


def row_of(call: Call, *, attempt: int, kind: int, named: bool, base: int | None, written: Delta) -> tuple[Any, ...]:
    """What `INSERT` takes. `named`: the id follows from the kind's name."""
    sampling = call.sampling
    blocks = to_json(written.blocks) if written.blocks else None
    lasted = _bits(call.ended_at) - _bits(call.started_at)
    seed = sampling.seed if sampling.seed is None or -(2**63) <= sampling.seed < 2**63 else str(sampling.seed)
    return (
        *(attempt, call.index, kind, None if named else call.id, base, call.parent_call_id is not None),
        *(written.shared, written.ids, written.logprobs, written.head, written.tail, blocks, written.body),
        *(
            call.policy_version,
            sampling.max_tokens,
            seed,
            clean(call.capture_reason),
            call.started_at,
            lasted if abs(lasted) < 2**31 else call.ended_at,
            attempt,
        ),
    )


def _bits(number: float) -> int:
    """The numbers that a float64 can be, counted: the next larger one has the next larger count."""
    return _INT64.unpack(_FLOAT64.pack(number))[0]


def _float(bits: int) -> float:
    return _FLOAT64.unpack(_INT64.pack(bits))[0]


_FLOAT64, _INT64 = struct.Struct("<d"), struct.Struct("<q")


def read_ids(connection: sqlite3.Connection, attempt: int, attempt_id: str) -> Iterator[tuple[str, int]]:
    """(call id, row) of an attempt's calls, in the order they were stored."""
    statement = (
        "SELECT calls.id, name, idx, seq FROM calls JOIN kinds ON kinds.id = kind WHERE attempt = ? ORDER BY seq"
    )
    for call_id, name, index, seq in connection.execute(statement, (attempt,)):
        yield call_id or _id_of(name, attempt_id, index), seq


def read_said(connection: sqlite3.Connection, seq: int, known: dict[int, Said]) -> Said:
    """One call as a base of others; it and those behind it are added to `known`."""
    rows: list[tuple[int, tuple[Any, ...]]] = []
    behind: int | None = seq
    while behind is not None and behind not in known:
        row = connection.execute(f"SELECT {SAID} FROM calls WHERE seq = ?", (behind,)).fetchone()
        rows.append((behind, row))
        behind = row[0]
    for number, row in reversed(rows):
        known[number], _ = _said_of(row, known)
    return known[seq]


def read_calls(connection: sqlite3.Connection, attempt_ids: Sequence[str]) -> list[Call]:
    """The attempts' calls, by index."""
    roots: dict[int, Said] = {}
    return [call for attempt_id in attempt_ids for call in _read_attempt(connection, attempt_id, roots)]


def _read_attempt(connection: sqlite3.Connection, attempt_id: str, roots: dict[int, Said]) -> list[Call]:
    """`roots` are calls that several attempts build upon."""
    attempt = connection.execute(ATTEMPT_SEQ, attempt_key(attempt_id)).fetchone()
    if attempt is None:
        return []
    known: dict[int, Said] = {}
    ids: dict[int, str] = {}
    calls: list[Call] = []
    for row in sorted(
        connection.execute(WHOLE, attempt), key=itemgetter(0)
    ):  # a base was always stored before what builds on it
        base = row[1]
        if base is not None and base not in known:
            known[base] = read_said(connection, base, roots)
        known[row[0]], logprobs = _said_of(row[1:9], known)
        calls.append(_call_of(row, known[row[0]], logprobs, attempt_id=attempt_id, ids=ids))
    return sorted(calls, key=lambda call: call.index)


def read_rewards(connection: sqlite3.Connection, attempt_id: str) -> list[Reward]:
    """In the order they were stored."""
    attempt = connection.execute(ATTEMPT_SEQ, attempt_key(attempt_id)).fetchone()
    if attempt is None:
        return []
    found = connection.execute(
        "SELECT call, name, value, source FROM rewards WHERE attempt = ? ORDER BY seq", attempt
    ).fetchall()
    ids: dict[int | None, str | None] = {None: None}
    if any(row[0] is not None for row in found):
        ids |= {seq: call_id for call_id, seq in read_ids(connection, attempt[0], attempt_id)}
    return [
        Reward(attempt_id=attempt_id, call_id=ids[call], name=name, value=value, source=source)
        for call, name, value, source in found
    ]


def _said_of(row: tuple[Any, ...], known: dict[int, Said]) -> tuple[Said, Floats]:
    base, shared, ids, logprobs, head, tail, blocks, body = row
    found = () if blocks is None else msgspec.json.decode(blocks, type=tuple[Block, ...])
    written = Delta(shared=shared, ids=ids, logprobs=logprobs, head=head, tail=tail, blocks=found, body=body)
    return delta.read(written, NOTHING if base is None else known[base])


def _call_of(row: tuple[Any, ...], said: Said, logprobs: Floats, *, attempt_id: str, ids: dict[int, str]) -> Call:
    """`ids` of the attempt's calls by row; this call's is added."""
    seq, base, call_id, index, continues = row[0], row[1], *row[9:12]
    policy_version, max_tokens, seed, capture_reason, started_at, ended_at = row[12:18]
    name, agent, policy, dialect, finish_reason, capture, sampling = row[18:]
    ids[seq] = call_id or _id_of(name, attempt_id, index)
    prompt_length = len(said.ids) - len(logprobs)
    return Call(
        id=ids[seq],
        attempt_id=attempt_id,
        index=index,
        parent_call_id=ids[base] if continues else None,
        agent=agent,
        policy=policy,
        policy_version=policy_version,
        dialect=dialect,
        request=msgspec.json.decode(said.request),
        response=msgspec.json.decode(said.response),
        prompt_ids=said.ids[:prompt_length],
        completion_ids=said.ids[prompt_length:],
        logprobs=logprobs,
        sampling=_sampling_of(sampling, max_tokens=max_tokens, seed=seed),
        finish_reason=finish_reason,
        capture=capture,
        capture_reason=capture_reason,
        started_at=started_at,
        ended_at=ended_at if isinstance(ended_at, float) else _float(_bits(started_at) + ended_at),
    )


def _sampling_of(shape: str, *, max_tokens: int | None, seed: int | str | None) -> Sampling:
    """Rows of the first schema have all of it in one place."""
    known = msgspec.json.decode(shape)
    if max_tokens is not None:
        known |= {"max_tokens": max_tokens, "seed": None if seed is None else int(seed)}
    return msgspec.convert(known, Sampling)
