"""Tasks from Spider (arXiv 1809.08887), read from its folder as it is downloaded.

    folder/train_spider.json  train_others.json  dev.json     questions with their gold SQL
    folder/tables.json                                       schemas
    folder/database/<db_id>/<db_id>.sqlite                   databases

In your own recipe, set `source = "spider:tasks"`, and the environment variable SPIDER to the folder. Broken entries are
skipped with a warning.
"""

import json
import os
import random
import warnings
from functools import cache
from pathlib import Path
from typing import Any

FILES = {"train": ("train_spider.json", "train_others.json"), "heldout": ("dev.json",)}
"""Spider's own split: no database occurs in both. Only the first file of each split is required."""
HINT = "SPIDER must name the downloaded folder, the one with tables.json in it"
UNFIT = (KeyError, TypeError, IndexError, ValueError)
"""Errors from entries whose form is not Spider's."""


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` questions of the folder that SPIDER names, in an order that depends on the seed; repeated if too few."""
    folder = os.environ.get("SPIDER")
    if not folder:
        raise ValueError(
            "the environment variable `SPIDER` is not set\nhint: set it to the folder that holds tables.json"
        )
    rows = load(Path(folder), split)
    order = random.Random(f"{split}-{seed}").sample(rows, len(rows))
    return (order * -(-count // len(order)))[:count]


@cache
def load(folder: Path, split: str) -> list[dict[str, Any]]:
    """All questions of a split, in the order of the files."""
    first, *others = FILES["train" if split == "train" else "heldout"]
    schemas: dict[str, str] = {}
    for place, row in _entries(folder / "tables.json"):
        try:
            schemas[row["db_id"]] = schema_text(row)
        except UNFIT as error:
            _leave_out(folder / "tables.json", place, error)
    rows: list[dict[str, Any]] = []
    for file in (folder / first, *(folder / name for name in others if (folder / name).exists())):
        for place, row in _entries(file):
            try:
                rows.append(_task(f"{file.stem}-{place}", row, schemas[row["db_id"]], folder))
            except UNFIT as error:
                _leave_out(file, place, error)
    if not rows:
        raise ValueError(f"no entry of `{folder / first}` can be read\nhint: {HINT}")
    return rows


def schema_text(row: dict[str, Any]) -> str:
    """The schema text for an entry of tables.json: a line per table, then a line per foreign key."""
    tables = row["table_names_original"]
    columns: list[list[str]] = [[] for _ in tables]
    for table, column in row["column_names_original"]:
        if table >= 0:  # the first entry is `*`, which belongs to no table
            columns[table].append(column)

    def full(column: int) -> str:
        table, name = row["column_names_original"][column]
        return f"{tables[table]}.{name}"

    lines = [f"table {table}: {' '.join(names)}" for table, names in zip(tables, columns, strict=True)]
    return "\n".join([*lines, *(f"{full(column)} = {full(referred)}" for column, referred in row["foreign_keys"])])


def _task(task_id: str, row: dict[str, Any], schema: str, folder: Path) -> dict[str, Any]:
    """A task without a second fill: Spider's databases are large enough to make a lucky match rare."""
    database = folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
    return {
        "id": task_id,
        "input": {
            "question": row["question"],
            "schema": schema,
            "database": str(database),
            "kind": "spider",
            "gold": row["query"],
        },
    }


def _entries(file: Path) -> list[tuple[int, Any]]:
    """The entries of a file, numbered from 1. Raises `ValueError` if the file is not a list."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`{file}` cannot be read: {error}\nhint: {HINT}") from error
    if not isinstance(found, list):
        raise ValueError(f"`{file}` is a `{type(found).__name__}`, not a list\nhint: {HINT}")
    return [*enumerate(found, start=1)]


def _leave_out(file: Path, place: int, error: Exception) -> None:
    what = f"{error} is missing or unknown" if isinstance(error, KeyError) else str(error)
    warnings.warn(f"`{file}` entry {place} is left out: {what}\nhint: {HINT}", stacklevel=3)
