"""Random databases: two or three tables with foreign keys, columns of text and numbers, and random rows.

A column has two names: one in the database, and one in the schema text. They differ if the schema text is out of date.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from words import CHILDREN, INTEGERS, LABELS, NUMBERS, PARENTS, TEXTS, Form, stored

T = TypeVar("T")

HELDOUT_SHARE = 4
"""One in this many schemas, and one in this many query structures, is held out."""
SALT = 570
"""Salt of the hash. Of 600 tried, it gives held-out and training structures about the same share of each clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    table: str
    name: str
    """Name in the database."""
    shown: str
    """Name in the schema text and in questions."""
    kind: Literal["label", "text", "integer"]
    words: tuple[str, ...] = ()
    """The values of a text column, as written in questions."""
    form: Form = "same"
    """How the database spells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    parents: tuple[str, ...] = ()
    """Tables that it refers to, each through a column `<parent>_id`."""
    is_parent: bool = False
    """Whether other tables refer to it, through its key `<name>_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    tables: tuple[Table, ...]

    @property
    def child(self) -> Table:
        """The table that refers to the others."""
        return next(table for table in self.tables if table.parents)

    def text(self) -> str:
        """The schema text that the agent reads."""
        return "\n".join(f"table {t.name}: {' '.join(_column_names(t, shown=True))}" for t in self.tables)

    def signature(self) -> str:
        """Tables and columns, independent of their order."""
        return ";".join(sorted(f"{t.name}({','.join(sorted(_column_names(t, shown=True)))})" for t in self.tables))


def is_heldout(text: str) -> bool:
    """Whether a schema signature or a query structure is held out. The same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{SALT} {text}".encode()).digest()[:8], "big") % HELDOUT_SHARE == 0


def random_schema(rng: random.Random) -> Schema:
    """One child with one or two parents. A column name occurs in only one table."""
    parents = rng.sample(PARENTS, rng.choice((1, 1, 2)))
    labels = rng.sample(LABELS, 1 + len(parents))
    texts = rng.sample(TEXTS, 2 + (len(parents) > 1))
    integers = rng.sample(INTEGERS, 3)
    child = rng.choice(CHILDREN)
    owners = [child, *parents]
    columns = {
        owner: [Column(table=owner, name=label, shown=label, kind="label")]
        for owner, label in zip(owners, labels, strict=True)
    }
    for owner, (names, values) in zip(owners, texts, strict=True):
        name = rng.choice(names)
        columns[owner].append(Column(table=owner, name=name, shown=name, kind="text", words=values))
    for owner, names in zip((child, child, parents[0]), integers, strict=True):
        name = rng.choice(names)
        columns[owner].append(Column(table=owner, name=name, shown=name, kind="integer"))
    tables = [Table(name=child, columns=_shuffled(columns[child], rng), parents=tuple(parents))]
    tables += [Table(name=parent, columns=_shuffled(columns[parent], rng), is_parent=True) for parent in parents]
    return Schema(tables=_shuffled(tables, rng))


def other_name(column: Column) -> str:
    """The other name for a column of this meaning."""
    pairs = [names for names, _ in TEXTS] if column.kind == "text" else list(INTEGERS)
    first, second = next(names for names in pairs if column.name in names)
    return second if column.name == first else first


def fill(schema: Schema, rng: random.Random, planted: Mapping[str, Iterable[int | str]]) -> str:
    """A script that builds the database with random rows. `planted`: column → values that must occur in it."""
    keys: dict[str, int] = {}
    statements: list[str] = []
    for table in sorted(schema.tables, key=lambda t: not t.is_parent):
        rows = rng.randint(8, 10) if table.is_parent else rng.randint(12, 20)
        values = [_column_values(column, rows, rng, tuple(planted.get(column.name, ()))) for column in table.columns]
        names = [f"{column.name} {'INTEGER' if column.kind == 'integer' else 'TEXT'}" for column in table.columns]
        if table.is_parent:
            keys[table.name] = rows
            names.insert(0, f"{table.name}_id INTEGER PRIMARY KEY")
            values.insert(0, [str(number) for number in range(1, rows + 1)])
        for parent in table.parents:
            names.append(f"{parent}_id INTEGER REFERENCES {parent}")
            values.append([str(rng.randint(1, keys[parent])) for _ in range(rows)])
        tuples = ",".join(f"({','.join(row)})" for row in zip(*values, strict=True))
        statements.append(f"CREATE TABLE {table.name}({', '.join(names)});\nINSERT INTO {table.name} VALUES {tuples};")
    return "\n".join(statements)


def _column_values(column: Column, rows: int, rng: random.Random, planted: tuple[int | str, ...]) -> list[str]:
    """A column's values as SQL literals. Numbers and labels are unique, so an order has no ties."""
    if column.kind == "label":
        return [f"'{column.table} {number}'" for number in rng.sample(range(100, 1000), rows)]
    if column.kind == "integer":
        rest = [number for number in NUMBERS if number not in planted]
        numbers = [int(number) for number in planted] + rng.sample(rest, rows - len(planted))
        rng.shuffle(numbers)
        return [str(number) for number in numbers]
    words = [str(word) for word in planted] * 2 + rng.choices(column.words, k=rows - 2 * len(planted))
    rng.shuffle(words)
    return [f"'{stored(word, column.form)}'" for word in words]


def _column_names(table: Table, *, shown: bool) -> list[str]:
    names = [column.shown if shown else column.name for column in table.columns]
    key = [f"{table.name}_id"] if table.is_parent else []
    return [*key, *names, *(f"{parent}_id" for parent in table.parents)]


def _shuffled(items: list[T], rng: random.Random) -> tuple[T, ...]:
    return tuple(rng.sample(items, len(items)))
