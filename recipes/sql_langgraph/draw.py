"""Draws a random query: first its target, then filters, then an order. Almost half of the queries need a join."""

import random
from dataclasses import replace

from grammar import Aggregate, Filter, Operator, Query
from schema import Column, Schema, Table
from words import NUMBERS

JOIN_SHARE = 0.45
"""Share of queries that need a second table."""

OPERATORS: tuple[Operator, ...] = ("!=", ">", ">=", "<", "<=", "BETWEEN")
AGGREGATES: tuple[Aggregate, ...] = ("AVG", "SUM", "MIN", "MAX")


def random_query(schema: Schema, rng: random.Random) -> Query:
    """A query over the child table, with or without one of its parents."""
    child = schema.child
    parents = [table for table in schema.tables if table.is_parent]
    parent = rng.choice(parents) if rng.random() < JOIN_SHARE else None
    while True:
        query = _with_filters(_random_target(child, parent, rng), child, parent, rng)
        if not query.aggregate and not query.distinct and query.group is None:
            query = _with_order(query, child, rng)
        joined = any(column.table != child.name for column in query.used())
        if joined == (parent is not None):
            return replace(query, parent=parent.name) if parent else query


def _random_target(child: Table, parent: Table | None, rng: random.Random) -> Query:
    texts, integers = _columns("text", child, parent), _columns("integer", child, parent)
    kind = rng.choices(
        ("one", "two", "distinct", "count", "count distinct", "aggregate", "groups", "aggregates"),
        (18, 16, 8, 12, 6, 22, 8, 10),
    )[0]
    if kind in ("one", "two"):
        pool = [column for table in (child, parent) if table for column in table.columns]
        return Query(table=child.name, columns=tuple(rng.sample(pool, 1 if kind == "one" else 2)))
    if kind in ("distinct", "count distinct"):
        return Query(
            table=child.name,
            columns=(rng.choice(texts),),
            distinct=True,
            aggregate="" if kind == "distinct" else "COUNT",
        )
    if kind in ("count", "groups"):
        return Query(table=child.name, aggregate="COUNT", group=rng.choice(texts) if kind == "groups" else None)
    group = rng.choice(texts) if kind == "aggregates" else None
    return Query(table=child.name, columns=(rng.choice(integers),), aggregate=rng.choice(AGGREGATES), group=group)


def _with_filters(query: Query, child: Table, parent: Table | None, rng: random.Random) -> Query:
    """Add no filter, one on text, one on numbers, or both; never on a column of the target."""
    free = [
        column
        for column in _columns("text", child, parent) + _columns("integer", child, parent)
        if column not in query.used()
    ]
    texts, integers = [c for c in free if c.kind == "text"], [c for c in free if c.kind == "integer"]
    kind = rng.choices(("none", "text", "number", "both"), (12, 33, 30, 25))[0]
    if (kind != "number" and kind != "none" and not texts) or (kind in ("number", "both") and not integers):
        kind = "none"
    filters: list[Filter] = []
    if kind in ("text", "both"):
        column = rng.choice(texts)
        filters.append(Filter(column=column, operator="=", values=(rng.choice(column.words),)))
    if kind in ("number", "both"):
        filters.append(_number_filter(rng.choice(integers), rng))
    return replace(query, filters=tuple(rng.sample(filters, len(filters))))


def _number_filter(column: Column, rng: random.Random) -> Filter:
    """A comparison with numbers from the middle of the range, so that some rows match and some do not."""
    operator = rng.choice(OPERATORS)
    low, high = sorted(rng.sample(NUMBERS[12:-12], 2))
    return Filter(column=column, operator=operator, values=(low, high) if operator == "BETWEEN" else (low,))


def _with_order(query: Query, child: Table, rng: random.Random) -> Query:
    """Order by a number of the child table. Its values are unique, so there are no ties."""
    kind = rng.choices(("none", "order", "limit"), (45, 30, 25))[0]
    if kind == "none":
        return query
    column = rng.choice(_columns("integer", child, None))
    return replace(
        query, order=column, descending=rng.random() < 0.5, limit=rng.choice((2, 3)) if kind == "limit" else None
    )


def _columns(kind: str, child: Table, parent: Table | None) -> list[Column]:
    tables = (child, parent) if parent is not None else (child,)
    return [column for table in tables for column in table.columns if column.kind == kind]
