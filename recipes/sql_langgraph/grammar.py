"""Queries as data, the SQL that answers them, and their questions in one of several wordings.

    Query(aggregate="AVG", columns=(price,), filters=(city = 'paris',))
      → SELECT AVG ( price ) FROM book WHERE city = 'paris'
      → the mean price of each book where city is 'paris'

Spaces separate all tokens, so a word is written alike in schema, question and SQL.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from schema import Column

Aggregate: TypeAlias = Literal["", "COUNT", "AVG", "SUM", "MIN", "MAX"]
Operator: TypeAlias = Literal["=", "!=", ">", ">=", "<", "<=", "BETWEEN"]
Name: TypeAlias = Callable[[Column], str]
Literally: TypeAlias = Callable[[Column, str], str]

AGGREGATE_WORDS = {
    "AVG": ("average", "mean", "typical"),
    "SUM": ("total", "combined", "summed"),
    "MIN": ("smallest", "lowest", "minimum"),
    "MAX": ("largest", "highest", "maximum"),
}
OPERATOR_WORDS = {
    "!=": ("not", "other than"),
    ">": ("over", "above", "more than"),
    ">=": ("at least", "no less than", "from"),
    "<": ("under", "below", "less than"),
    "<=": ("at most", "no more than", "up to"),
    "BETWEEN": ("between", "within"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    column: Column
    operator: Operator
    values: tuple[str | int, ...]
    """One; two for BETWEEN. Words are written as in the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    table: str
    parent: str | None = None
    """The table to join, through `<parent>_id`; None for no join."""
    columns: tuple[Column, ...] = ()
    """The target; empty if rows are counted."""
    aggregate: Aggregate = ""
    distinct: bool = False
    group: Column | None = None
    """One result row for each value of this column."""
    filters: tuple[Filter, ...] = ()
    order: Column | None = None
    descending: bool = False
    limit: int | None = None

    def used(self) -> tuple[Column, ...]:
        """Every column of the query, once."""
        named = [*self.columns, self.group, *(f.column for f in self.filters), self.order]
        return tuple(dict.fromkeys(column for column in named if column is not None))


def sql(query: Query, *, name: Name, literal: Literally) -> str:
    """`name` gives the name of a column, `literal` the spelling of a word that is compared with it."""
    target = " , ".join(name(column) for column in query.columns) or "*"
    target = f"DISTINCT {target}" if query.distinct else target
    target = f"{query.aggregate} ( {target} )" if query.aggregate else target
    if query.group is not None:
        target = f"{name(query.group)} , {target}"
    parts = [f"SELECT {target} FROM {query.table}"]
    if query.parent is not None:
        parts.append(f"JOIN {query.parent} USING ( {query.parent}_id )")
    if query.filters:
        parts.append("WHERE " + " AND ".join(_condition(f, name, literal) for f in query.filters))
    if query.group is not None:
        parts.append(f"GROUP BY {name(query.group)}")
    if query.order is not None:
        parts.append(f"ORDER BY {name(query.order)}" + (" DESC" if query.descending else ""))
    if query.limit is not None:
        parts.append(f"LIMIT {query.limit}")
    return " ".join(parts)


def structure(sql_text: str) -> str:
    """The skeleton, without names and values."""
    return re.sub(r"[a-z_]+", "_", re.sub(r"'[^']*'|\b\d+\b", "?", sql_text))


def question(query: Query, rng: random.Random) -> str:
    """One wording of the question. It uses the column names of the schema text."""
    text = _say_target(query, rng)
    if query.filters:
        text += rng.choice((" where ", " whose ")) + " and ".join(_say_filter(f, rng) for f in query.filters)
    return text + _say_order(query, rng)


def _condition(f: Filter, name: Name, literal: Literally) -> str:
    values = [f"'{literal(f.column, value)}'" if isinstance(value, str) else str(value) for value in f.values]
    return f"{name(f.column)} {f.operator} {' AND '.join(values)}"


def _say_target(query: Query, rng: random.Random) -> str:
    table = query.table if query.parent is None else f"{query.table} {rng.choice(('and', 'with'))} its {query.parent}"
    what = " , ".join(column.shown for column in query.columns)
    kind = rng.choice(("different", "distinct", "unique")) + " " if query.distinct else ""
    if query.aggregate == "COUNT":
        counted = f"{kind}{what}" if query.columns else "rows"
        text = rng.choice(
            (f"how many {counted} of {table}", f"count the {counted} of {table}", f"the number of {counted} of {table}")
        )
    elif query.aggregate:
        text = f"the {rng.choice(AGGREGATE_WORDS[query.aggregate])} {what} of {table}"
    else:
        text = f"{rng.choice(('show', 'list', 'give', 'find'))} the {kind}{what} of {table}"
    return text if query.group is None else f"{rng.choice(('for each', 'per'))} {query.group.shown} {text}"


def _say_filter(f: Filter, rng: random.Random) -> str:
    if f.column.kind == "text":
        return f"{f.column.shown} {rng.choice(('is', 'equals'))} '{f.values[0]}'"
    return f"{f.column.shown} {rng.choice(OPERATOR_WORDS[f.operator])} {' and '.join(str(value) for value in f.values)}"


def _say_order(query: Query, rng: random.Random) -> str:
    if query.order is None:
        return ""
    if query.limit is not None:
        word = rng.choice(("top", "highest") if query.descending else ("bottom", "lowest"))
        return f" , {word} {query.limit} by {query.order.shown}"
    directions = ("by descending", "from highest") if query.descending else ("by ascending", "from lowest")
    return f" , {rng.choice(directions)} {query.order.shown}"
