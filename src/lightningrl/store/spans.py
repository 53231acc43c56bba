"""Spans ⇄ rows. They may be late: exporters send what they have every few seconds, and an attempt does not wait for
that.
"""

import sqlite3
import time
from typing import Any

import msgspec

from lightningrl.errors import StoreError
from lightningrl.store.calls import ATTEMPT_SEQ, read_ids
from lightningrl.store.rows import attempt_key, clean, to_json
from lightningrl.types import Span

LATE_S = 300.0
"""Spans of an attempt are taken until it has ended this long ago. The OpenTelemetry SDK exports every 5 s, and tries
again for up to 64 s.
"""

COLUMNS = "id, call, kind, name, status, error, input, output, started_at, ended_at, trace, parent, attributes"
INSERT = f"INSERT INTO spans (attempt, {COLUMNS}) VALUES ({', '.join('?' * 14)}) ON CONFLICT DO NOTHING"
"""An exporter that got no answer sends its spans again."""


def check_open(connection: sqlite3.Connection, attempt_id: str) -> None:
    """Raises `StoreError` if there is no such attempt, or it ended too long ago."""
    statement = "SELECT ended_at FROM whole_attempts WHERE rollout_id = ? AND number = ?"
    for (ended_at,) in connection.execute(statement, attempt_key(attempt_id)):
        if ended_at is None or time.time() - ended_at < LATE_S:
            return
        raise StoreError(f"attempt `{attempt_id}` ended more than {LATE_S:g} s ago: it takes no more spans")
    raise StoreError(f"no attempt `{attempt_id}`")


def row_of(span: Span, *, attempt: int, call: int | None) -> tuple[Any, ...]:
    """What `INSERT` takes."""
    told = (span.kind, clean(span.name), span.status, clean(span.error), clean(span.input), clean(span.output))
    place = (span.started_at, span.ended_at, span.trace_id, span.parent_id)
    return (attempt, span.id, call, *told, *place, to_json(span.attributes))


def read_spans(connection: sqlite3.Connection, attempt_id: str) -> list[Span]:
    """By the time at which they began."""
    attempt = connection.execute(ATTEMPT_SEQ, attempt_key(attempt_id)).fetchone()
    if attempt is None:
        return []
    found = connection.execute(
        f"SELECT {COLUMNS} FROM spans WHERE attempt = ? ORDER BY started_at, seq", attempt
    ).fetchall()
    ids: dict[int | None, str | None] = {None: None}
    if any(row[1] is not None for row in found):
        ids |= {seq: call_id for call_id, seq in read_ids(connection, attempt[0], attempt_id)}
    return [_span_of(row, attempt_id=attempt_id, call_id=ids[row[1]]) for row in found]


def _span_of(row: tuple[Any, ...], *, attempt_id: str, call_id: str | None) -> Span:
    span_id, _, kind, name, status, error, given, output, started_at, ended_at, trace_id, parent_id, attributes = row
    return Span(
        id=span_id,
        attempt_id=attempt_id,
        call_id=call_id,
        kind=kind,
        name=name,
        status=status,
        error=error,
        input=given,
        output=output,
        started_at=started_at,
        ended_at=ended_at,
        trace_id=trace_id,
        parent_id=parent_id,
        attributes=msgspec.json.decode(attributes),
    )
