"""Tasks from Calc-X (arXiv 2305.15017), read from its files as they are downloaded.

    folder/data/train-….parquet  validation-….parquet  test-….parquet     as on the Hugging Face hub: MU-NLPC/Calc-X, …
    folder/train.jsonl           validation.jsonl      test.jsonl         the same columns, one row per line

The columns `question` and `result` are required; `id` and `result_float` are optional; all others are ignored.

In your own recipe, set `source = "calc_x:tasks"`, and the environment variable CALC_X to the folder. Reading Parquet
needs the package `datasets`.
"""

import json
import math
import os
import random
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tasks import NUMBER

FILES = {"train": ("train",), "heldout": ("validation", "test")}
"""Calc-X's own split. Of several names, the first one with files counts."""
HINT = "a row has the columns of Calc-X, at least `question` and `result`"
WORD = re.compile(r"[A-Za-z]+")


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` problems of the folder that CALC_X names, in an order that depends on the seed; repeated if too few.

    Broken rows are skipped with a warning. Raises `ValueError` if no row is left.
    """
    folder = os.environ.get("CALC_X")
    if not folder:
        hint = "set it to a folder with train.jsonl or data/train-….parquet"
        raise ValueError(f"the environment variable `CALC_X` is not set\nhint: {hint}")
    rows = load(Path(folder), split)
    order = random.Random(f"{split}-{seed}").sample(rows, len(rows))
    return (order * -(-count // len(order)))[:count]


@cache
def load(folder: Path, split: str) -> list[dict[str, Any]]:
    """All problems of a split. Broken rows are skipped; a warning names the file, the row and the error."""
    found: list[dict[str, Any]] = []
    for file in _files(folder, split):
        for place, row in _rows(file):
            try:
                found.append(_task(row, f"{file.stem}-{place}"))
            except (ValueError, RecursionError) as error:  # ValueError includes broken JSON and broken UTF-8
                unit = "line" if file.suffix == ".jsonl" else "row"
                warnings.warn(f"`{file}` {unit} {place} is left out: {error}\nhint: {HINT}", stacklevel=2)
    if not found:
        raise ValueError(f"no row of `{folder}` can be read\nhint: {HINT}")
    return found


def _files(folder: Path, split: str) -> list[Path]:
    names = FILES["train" if split == "train" else "heldout"]
    for name in names:
        files = sorted(file for suffix in ("jsonl", "parquet") for file in folder.rglob(f"{name}*.{suffix}"))
        if files:
            return files
    wanted = " or ".join(f"{name}*.jsonl, {name}*.parquet" for name in names)
    raise ValueError(f"`{folder}` has no file for the split `{split}`\nhint: it is called {wanted}")


def _rows(file: Path) -> Iterator[tuple[int, object]]:
    """The rows, numbered from 1. Rows of JSONL are bytes, so that a broken line spoils no other."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            yield from ((place, line) for place, line in enumerate(lines, start=1) if line.strip())
        return
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(f"`{file}` is read with `datasets`\nhint: pip install datasets") from error
    yield from enumerate(datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True), start=1)


def _task(row: object, name: str) -> dict[str, Any]:
    if isinstance(row, bytes):
        row = json.loads(row)
    if not isinstance(row, dict):
        raise ValueError(f"a `{type(row).__name__}`, not an object")
    for column in ("question", "result"):
        if not isinstance(row.get(column), str) or not row[column].strip():
            value = json.dumps(row[column])[:40] if column in row else "missing"
            raise ValueError(f"`{column}` is {value}, not a text")
    return {"id": str(row.get("id") or name), "input": {"question": row["question"], "answer": _right(row)}}


def _right(row: dict[str, Any]) -> str:
    """`result` if it is a number or the letter of an option. If it has another form (`1_3/4`), `result_float`."""
    result, number = row["result"].strip(), row.get("result_float")
    plain = NUMBER.fullmatch(result) or WORD.fullmatch(result)
    return repr(number) if not plain and isinstance(number, float) and math.isfinite(number) else result
