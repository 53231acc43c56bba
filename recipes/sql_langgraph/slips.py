"""Typical mistakes: each makes one decision of a query wrongly. A good task exposes every one of them.

No two wordings are swapped: if `over` is mistaken for X, then X is never mistaken for `over`. Otherwise a model that
makes both mistakes half of the time could not tell the wordings apart, and reward would make it answer both alike.
"""

from collections.abc import Iterator
from dataclasses import replace

from grammar import Aggregate, Operator, Query

WRONG_OPERATOR: dict[Operator, Operator] = {">": ">=", ">=": "=", "<": "<=", "<=": "=", "!=": "=", "BETWEEN": ">="}
WRONG_AGGREGATE: dict[Aggregate, Aggregate] = {"MAX": "MIN", "MIN": "AVG", "AVG": "SUM", "SUM": "COUNT"}


def slips(query: Query) -> Iterator[tuple[str, Query]]:
    """Yields (name, query with this one mistake) for every mistake that is possible in it."""
    for index, condition in enumerate(query.filters):
        if condition.operator in WRONG_OPERATOR:
            wrong = replace(condition, operator=WRONG_OPERATOR[condition.operator], values=condition.values[:1])
            yield "operator", replace(query, filters=(*query.filters[:index], wrong, *query.filters[index + 1 :]))
    if len(query.filters) > 1:
        yield "filter", replace(query, filters=query.filters[:1])
    if query.aggregate in WRONG_AGGREGATE:
        yield "aggregate", replace(query, aggregate=WRONG_AGGREGATE[query.aggregate])
    if query.distinct:
        yield "distinct", replace(query, distinct=False)
    if query.group is not None:
        yield "group", replace(query, group=None)
    if query.order is not None:
        yield "order", replace(query, descending=False) if query.descending else replace(query, order=None)
    if query.limit is not None:
        yield "limit", replace(query, limit=None)
    if query.parent is not None:
        yield "join", replace(query, parent=None)


def with_slips(query: Query, names: frozenset[str]) -> Query:
    """The query with all of the named mistakes that are possible in it."""
    for name in sorted(names):
        for found, wrong in slips(query):
            if found == name:
                query = wrong
                break
    return query
