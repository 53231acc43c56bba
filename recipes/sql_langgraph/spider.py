"""How does Spider (arXiv 1809.08887) become tasks? From its own folder, as it is downloaded, to rows that agent and reward understand.

    folder/train_spider.json  train_others.json  dev.json     questions with their gold SQL
    folder/tables.json                                       schemas
    folder/database/<db_id>/<db_id>.sqlite                   databases

In a recipe of your own: `source = "spider:tasks"`, and the folder in the environment variable SPIDER.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

FILES = {"train": ("train_spider.json", "train_others.json"), "heldout": ("dev.json",)}
"""Spider's own split: no database of one file occurs in the other. Only the first of each must be there."""


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` questions of the folder that SPIDER names, in an order that follows from the seed; all over again if there are fewer."""
    folder = os.environ.get("SPIDER")
    if not folder:
        raise ValueError("the environment variable `SPIDER` is not set\nhint: let it name the folder that holds tables.json")
    rows = load(Path(folder), split)
    random.Random(f"{split}-{seed}").shuffle(rows)
    return (rows * -(-count // len(rows)))[:count]


def load(folder: Path, split: str) -> list[dict[str, Any]]:
    """Every question of a split, in the order of the files."""
    first, *others = FILES["train" if split == "train" else "heldout"]
    questions = [*_read(folder / first), *(row for name in others if (folder / name).exists() for row in _read(folder / name))]
    schemas = {row["db_id"]: schema_text(row) for row in _read(folder / "tables.json")}
    return [_task(f"{split}-{index}", row, schemas[row["db_id"]], folder) for index, row in enumerate(questions)]


def schema_text(row: dict[str, Any]) -> str:
    """A line for each table, and one for each foreign key, from an entry of tables.json."""
    tables = row["table_names_original"]
    columns: list[list[str]] = [[] for _ in tables]
    for table, column in row["column_names_original"]:
        if table >= 0:  # the first entry is `*`, of no table
            columns[table].append(column)

    def full(column: int) -> str:
        table, name = row["column_names_original"][column]
        return f"{tables[table]}.{name}"

    lines = [f"table {table}: {' '.join(names)}" for table, names in zip(tables, columns, strict=True)]
    return "\n".join([*lines, *(f"{full(column)} = {full(referred)}" for column, referred in row["foreign_keys"])])


def _task(task_id: str, row: dict[str, Any], schema: str, folder: Path) -> dict[str, Any]:
    """There is no second fill: Spider's databases are large enough to make a lucky match rare."""
    database = folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
    return {
        "id": task_id,
        "input": {"question": row["question"], "schema": schema, "database": str(database), "kind": "spider", "gold": row["query"]},
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))
