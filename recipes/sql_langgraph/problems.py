"""Makes a task: draw a schema, a query and two fills, until the fills expose every typical mistake.

There are four kinds. `plain`: one good query is enough. `literal`: the database spells words differently from the
question. `column`: the schema text is out of date. `both`. Only running a query reveals what is missing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from database import Database, comparable, is_empty, is_ordered, open_database, run_query
from draw import random_query
from grammar import Query, question, sql, structure
from schema import Column, Schema, fill, is_heldout, other_name, random_schema
from slips import slips
from words import Form, stored

Kind: TypeAlias = Literal["plain", "literal", "column", "both"]

KINDS: dict[Kind, int] = {"plain": 42, "literal": 28, "column": 22, "both": 8}
"""Percent of tasks."""

FILLS = 3
"""Pairs of random fills to try before a new query is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    kind: Kind
    schema: Schema
    query: Query
    question: str
    gold: str
    """SQL that answers the question on this database."""
    setups: tuple[str, str]
    """Scripts that build the database and a second fill of the same schema."""


def random_problem(rng: random.Random, *, heldout: bool) -> Problem:
    """A problem whose schema and query structure both belong to the requested split."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    while True:
        schema = _disguised(random_schema(rng), kind, rng)
        if is_heldout(schema.signature()) != heldout:
            continue
        query = random_query(schema, rng)
        gold = gold_sql(query)
        if is_heldout(structure(gold)) != heldout or not _needs_feedback(query, kind):
            continue
        for _ in range(FILLS):
            setups = (_fill(schema, query, rng), _fill(schema, query, rng))
            if _tells_slips_apart(query, gold, setups):
                return Problem(
                    kind=kind, schema=schema, query=query, question=question(query, rng), gold=gold, setups=setups
                )


def gold_sql(query: Query) -> str:
    return sql(query, name=lambda column: column.name, literal=lambda column, word: stored(word, column.form))


def _disguised(schema: Schema, kind: Kind, rng: random.Random) -> Schema:
    """Change how the database spells words, and rename one column that the schema text shows."""
    form: Form = rng.choice(("upper", "code")) if kind in ("literal", "both") else "same"
    named = [column for table in schema.tables for column in table.columns if column.kind != "label"]
    outdated = [rng.choice(named)] if kind in ("column", "both") else []

    def disguise(column: Column) -> Column:
        name = other_name(column) if column in outdated else column.name
        return replace(column, name=name, form=form if column.kind == "text" else "same")

    tables = (replace(table, columns=tuple(disguise(column) for column in table.columns)) for table in schema.tables)
    return Schema(tables=tuple(tables))


def _needs_feedback(query: Query, kind: Kind) -> bool:
    """Whether the disguise affects this query. A plain task has none."""
    compares_words = any(condition.column.kind == "text" for condition in query.filters)
    uses_outdated = any(column.name != column.shown for column in query.used())
    return (kind not in ("literal", "both") or compares_words) and (kind not in ("column", "both") or uses_outdated)


def _fill(schema: Schema, query: Query, rng: random.Random) -> str:
    return fill(schema, rng, {condition.column.name: condition.values for condition in query.filters})


def _tells_slips_apart(query: Query, gold: str, setups: Sequence[str]) -> bool:
    """Whether gold returns rows on both fills, and every slip returns something else on at least one of them."""
    databases = [open_database({"setup": setup}) for setup in setups]
    try:
        found = [run_query(database, gold) for database in databases]
        if any(is_empty(rows) for rows in found):
            return False
        expected = [comparable(rows, ordered=is_ordered(gold)) for rows in found]
        wrong = [gold_sql(other) for name, other in slips(query) if name != "join"]  # without the join it is an error
        return not any(_all_return(databases, text, expected, ordered=is_ordered(gold)) for text in wrong)
    finally:
        for database in databases:
            database.close()


def _all_return(databases: Sequence[Database], query: str, expected: Sequence[list[str]], *, ordered: bool) -> bool:
    return all(
        comparable(run_query(database, query), ordered=ordered) == rows
        for database, rows in zip(databases, expected, strict=True)
    )
