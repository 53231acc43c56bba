"""What does a database have to say about a query? Rows, or an error, or nothing; and in the last two cases what may
help to mend it.
"""

import re
import sqlite3
from dataclasses import dataclass

from database import Database, columns_of, is_empty, run_query

COMPARED = re.compile(r"(\w+)\s*=\s*'([^']*)'")
"""A column and the word it is compared with."""
SHOWN_VALUES = 8
"""A column with more values than this is not listed."""
SHOWN_ROWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    text: str
    """Shown to the model that rewrites the query."""
    good: bool
    """The query ran and found something."""


def execute(database: Database, query: str) -> Feedback:
    """Run a query. An error is followed by the real columns of the tables it names, an empty result by the values it
    could have asked for.
    """
    try:
        rows = run_query(database, query)
    except (sqlite3.Error, ValueError) as error:  # ValueError: a null character in the query
        return Feedback(text="\n".join([str(error), *_columns(database, query)]), good=False)
    if is_empty(rows):
        return Feedback(text="\n".join(["nothing found", *_values(database, query)]), good=False)
    return Feedback(text="\n".join(" ".join(map(str, row)) for row in rows[:SHOWN_ROWS]), good=True)


def _columns(database: Database, query: str) -> list[str]:
    words = set(re.findall(r"\w+", query.lower()))
    return [
        f"columns of {table}: {' '.join(columns)}"
        for table, columns in columns_of(database).items()
        if table.lower() in words
    ]


def _values(database: Database, query: str) -> list[str]:
    """The values of each column that the query compares with a word that does not occur in it."""
    lines: dict[str, None] = {}
    for column, word in COMPARED.findall(query):
        for table in [table for table, columns in columns_of(database).items() if column in columns]:
            try:
                rows = run_query(database, f'SELECT DISTINCT "{column}" FROM "{table}" LIMIT {SHOWN_VALUES + 1}')
            except sqlite3.Error:  # too much work: then it is not a column of few values
                continue
            values = [str(value) for (value,) in rows]
            if word not in values and len(values) <= SHOWN_VALUES:
                lines[f"values of {column}: " + " ".join(f"'{value}'" for value in values)] = None
    return list(lines)
