"""Which queued rollouts may a worker claim? Those whose labels it has, oldest first.

Rollouts with the same labels stand in one queue of their own, which an index keeps in order. So a claim costs the same
however many rollouts wait that the worker may not run.
"""

from collections.abc import Collection
from typing import Any

from lightningrl.store.connection import Connection
from lightningrl.store.rows import ROLLOUT, labels_of

NEXT = "SELECT min(labels) FROM rollouts WHERE status = 'queued' AND labels > ?"
OLDEST = f"SELECT seq, {ROLLOUT} FROM whole_rollouts WHERE status = 'queued' AND labels = ? ORDER BY seq LIMIT ?"


def queued(connection: Connection, labels: Collection[str], *, limit: int) -> list[tuple[Any, ...]]:
    """Up to `limit` rows with the columns `ROLLOUT`."""
    found = connection.execute(OLDEST, ("", limit)).fetchall()
    (asked,) = connection.execute(NEXT, ("",)).fetchone()
    while asked is not None:
        if set(labels).issuperset(labels_of(asked)):
            found += connection.execute(OLDEST, (asked, limit)).fetchall()
        (asked,) = connection.execute(NEXT, (asked,)).fetchone()
    return [row[1:] for row in sorted(found, key=lambda row: row[0])[:limit]]
