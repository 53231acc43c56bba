"""Spans ⇄ rows. Spans may arrive after their attempt has ended, since exporters send every few seconds."""

import time
from typing import Any

import msgspec

from lightningrl.errors import StoreError
from lightningrl.store.calls import read_ids
from lightningrl.store.connection import Connection
from lightningrl.store.rows import clean, find_attempt, the_attempt, to_json
from lightningrl.types import Span

LATE_S = 300.0
"""Seconds after its end for which an attempt takes spans. OpenTelemetry exports every 5 s, with retries for 64 s."""

COLUMNS = "id, call, kind, name, status, error, input, output, started_at, ended_at, trace, parent, attributes"
INSERT = f"INSERT INTO spans (attempt, {COLUMNS}) VALUES ({', '.join('?' * 14)}) ON CONFLICT DO NOTHING"
"""Ignores duplicates: an exporter without a response sends its spans again."""


def open_attempt(connection: Connection, attempt_id: str) -> int:
    """The row of an attempt that still takes spans. Raises `StoreError` if it ended too long ago, or does not exist."""
    attempt = the_attempt(connection, attempt_id)
    if attempt.ended_at is not None and time.time() - attempt.ended_at >= LATE_S:
        raise StoreError(f"attempt `{attempt_id}` ended more than {LATE_S:g} s ago: it takes no more spans")
    return attempt.seq


def row_of(span: Span, *, attempt: int, call: int | None) -> tuple[Any, ...]:
    """The values of `INSERT`."""
    told = (span.kind, clean(span.name), span.status, clean(span.error), clean(span.input), clean(span.output))
    place = (span.started_at, span.ended_at, span.trace_id, span.parent_id)
    return (attempt, span.id, call, *told, *place, to_json(span.attributes))


def read_spans(connection: Connection, attempt_id: str) -> list[Span]:
    """The spans of an attempt, ordered by start."""
    attempt = find_attempt(connection, attempt_id)
    if attempt is None:
        return []
    statement = f"SELECT {COLUMNS} FROM spans WHERE attempt = ? ORDER BY started_at, seq"
    found = connection.execute(statement, (attempt.seq,)).fetchall()
    ids: dict[int | None, str | None] = {None: None}
    if any(row[1] is not None for row in found):
        ids |= read_ids(connection, attempt.seq, attempt_id)
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
