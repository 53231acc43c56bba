"""How did many rollouts end? One row each, without reading the calls: a table of 100,000 rollouts takes seconds.

The attempt that a row describes is the accepted one, or else the latest.
"""

from typing import Any

from lightningrl.store.base import Outcome, Outcomes
from lightningrl.store.connection import Connection
from lightningrl.types import FINAL

CHANGED = "SELECT * FROM rollouts WHERE changed > ? ORDER BY changed LIMIT ?"
EARLIER = "SELECT * FROM rollouts WHERE changed <= ? ORDER BY changed DESC LIMIT ?"
RUNNING = "SELECT * FROM rollouts WHERE seq IN (SELECT rollout FROM attempts WHERE status = 'running')"

ERROR = 1000
"""Characters of an error that are read for its first line."""

_OUTCOMES = """
    WITH chosen AS ({chosen}),
    tried AS (SELECT chosen.*, (SELECT max(number) FROM attempts WHERE rollout = chosen.seq) AS tries FROM chosen)
    SELECT
        tried.changed, tried.seq, tried.id, group_id, task_id, split, tried.status, coalesce(tries, 0),
        told.status, coalesce(told.worker, ''), told.started_at, told.ended_at, substr(told.error, 1, {error}),
        (
            SELECT value FROM rewards
            WHERE attempt = told.seq AND accepted IS NOT NULL AND call IS NULL AND name = '{final}'
            ORDER BY source = 'grader' DESC, seq DESC LIMIT 1
        ),
        (SELECT count(*) FROM calls WHERE attempt = told.seq),
        coalesce((SELECT sum({sampled}) FROM calls WHERE attempt = told.seq AND replays IS NULL), 0),
        tried.branch IS NOT NULL
    FROM tried LEFT JOIN attempts AS told ON told.rollout = tried.seq AND told.number = coalesce(accepted, tries)
"""
"""The length of a column is in the head of its row: no logprob is read to count the sampled tokens.
Played-back calls sampled none.
"""


def read_outcomes(
    connection: Connection, *, after: int | None, before: int | None, limit: int, sampled: str
) -> Outcomes:
    """`sampled`: an expression for the number of sampled tokens of a row of `calls`."""
    if after is None:
        assert before is not None, "one of `after` and `before` is given"
        found = _read(connection, EARLIER, before, limit, sampled=sampled)
        return Outcomes(cursor=min(found, default=0) - 1, rows=tuple(found.values()))
    found = _read(connection, CHANGED, after, limit, sampled=sampled)
    running = _read(connection, RUNNING, sampled=sampled)
    return Outcomes(cursor=max(found, default=after), rows=tuple({**running, **found}.values()))


def _read(connection: Connection, chosen: str, *values: int, sampled: str) -> dict[int, Outcome]:
    """{number of its last change: outcome}"""
    statement = _OUTCOMES.format(chosen=chosen, error=ERROR, final=FINAL, sampled=sampled)
    return {row[0]: _outcome_of(row) for row in connection.execute(statement, values).fetchall()}


def _outcome_of(row: tuple[Any, ...]) -> Outcome:
    error = row[12].splitlines()[0] if row[12] else None
    return Outcome._make((*row[1:12], error, *row[13:16], bool(row[16])))
