"""A rule for `[[air]]`: judges a call at once if SQLite cannot even parse its answer."""

import sqlite3
from typing import Any

UNREADABLE = ("syntax error", "unrecognized token", "incomplete input", "not an error")


def unreadable(span: Any) -> float | None:
    """1 for a model's answer that is not SQL, whatever the database; None for everything else."""
    if span.kind != "llm" or span.output is None:
        return None
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"EXPLAIN {span.output}")
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a null character in the query
        return 1.0 if any(reason in str(error) for reason in UNREADABLE) else None
    finally:
        database.close()
    return None
