"""The database's feedback on a query: rows, an error or an empty result, the last two with a hint for a rewrite."""

import re
import sqlite3
from dataclasses import dataclass

from database import Database, columns_of, is_empty, run_query

COMPARED = re.compile(r"(\w+)\s*=\s*'([^']*)'")
"""A column and the word that it is compared with."""
SHOWN_VALUES = 8
"""Columns with more values than this are not listed."""
SHOWN_ROWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    text: str
    """Text for the model that rewrites the query."""
    good: bool
    """The query ran and found rows."""


def execute(database: Database, query: str) -> Feedback:
    """Run a query.

    After an error, the feedback lists the real columns of the query's tables. After an empty result, it lists the
    values of the compared columns.
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
    """Lists the values of each column that the query compares with a word not among them."""
    lines: dict[str, None] = {}
    for column, word in COMPARED.findall(query):
        for table in [table for table, columns in columns_of(database).items() if column in columns]:
            try:
                rows = run_query(database, f'SELECT DISTINCT "{column}" FROM "{table}" LIMIT {SHOWN_VALUES + 1}')
            except sqlite3.Error:  # too much work, so the column has many values
                continue
            values = [str(value) for (value,) in rows]
            if word not in values and len(values) <= SHOWN_VALUES:
                lines[f"values of {column}: " + " ".join(f"'{value}'" for value in values)] = None
    return list(lines)
