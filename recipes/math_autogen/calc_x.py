"""How does Calc-X (arXiv 2305.15017) become tasks? From its own files, as they are downloaded, to rows that agent and
reward understand.

    folder/data/train-….parquet  validation-….parquet  test-….parquet     as the Hugging Face hub has them:
    MU-NLPC/Calc-X, Calc-gsm8k, … folder/train.jsonl           validation.jsonl      test.jsonl         the same
    columns, one row a line

Of the columns, `question` and `result` are needed, `id` and `result_float` are read where they are there; `chain`,
`equation` and the like are not.

In a recipe of your own: `source = "calc_x:tasks"`, and the folder in the environment variable CALC_X. Parquet is read
with `datasets`.
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
"""Calc-X's own split. Of several names, the first that there are files of."""
HINT = "a row has the columns of Calc-X, `question` and `result` among them"
WORD = re.compile(r"[A-Za-z]+")


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` problems of the folder that CALC_X names, in an order that follows from the seed; all over again if there
    are fewer.

    A row that cannot be read is left out, and named in a warning. Raises `ValueError` if none is left.
    """
    folder = os.environ.get("CALC_X")
    if not folder:
        raise ValueError(
            "the environment variable `CALC_X` is not set\nhint: let it name a folder with train.jsonl or data/train-….parquet"
        )
    rows = load(Path(folder), split)
    order = random.Random(f"{split}-{seed}").sample(rows, len(rows))
    return (order * -(-count // len(order)))[:count]


@cache
def load(folder: Path, split: str) -> list[dict[str, Any]]:
    """Every problem of a split. Rows that are none are named in warnings, once: file, number of the line or row, and
    what is wrong with it.
    """
    found: list[dict[str, Any]] = []
    for file in _files(folder, split):
        for place, row in _rows(file):
            try:
                found.append(_task(row, f"{file.stem}-{place}"))
            except (ValueError, RecursionError) as error:  # ValueError: also no JSON, no UTF-8
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
    """Each row with its number from 1; of JSONL the bytes of the line, so that one that is broken spoils no other."""
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
            raise ValueError(
                f"`{column}` is {json.dumps(row[column])[:40] if column in row else 'missing'}, not a text"
            )
    return {"id": str(row.get("id") or name), "input": {"question": row["question"], "answer": _right(row)}}


def _right(row: dict[str, Any]) -> str:
    """`result`, if it is a number or the letter of an option; where it is written in another way (`1_3/4`), the float
    beside it.
    """
    result, number = row["result"].strip(), row.get("result_float")
    plain = NUMBER.fullmatch(result) or WORD.fullmatch(result)
    return repr(number) if not plain and isinstance(number, float) and math.isfinite(number) else result
