"""Tasks from MuSiQue (arXiv 2108.00573), read from its files as they are downloaded.

    folder/musique_ans_v1.0_train.jsonl    one question per line, with 20 paragraphs each
    folder/musique_ans_v1.0_dev.jsonl

In your own recipe, set `source = "musique:tasks"`, and the environment variable MUSIQUE to the folder. The agent
searches the paragraphs of all questions of a file. Unanswerable questions are skipped; broken lines are skipped with a
warning.
"""

import json
import os
import random
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FILES = {"train": "musique_ans_v1.0_train.jsonl", "heldout": "musique_ans_v1.0_dev.jsonl"}
FIELDS = {
    "id": str,
    "question": str,
    "answer": str,
    "answer_aliases": list,
    "answerable": bool,
    "paragraphs": list,
    "question_decomposition": list,
}


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` questions of the folder that MUSIQUE names, in an order that depends on the seed; repeated if too few."""
    folder = os.environ.get("MUSIQUE")
    if not folder:
        hint = "set it to the folder that holds musique_ans_v1.0_train.jsonl"
        raise ValueError(f"the environment variable `MUSIQUE` is not set\nhint: {hint}")
    rows = load(Path(folder) / FILES["train" if split == "train" else "heldout"])
    order = random.Random(f"{split}-{seed}").sample(rows, len(rows))
    return (order * -(-count // len(order)))[:count]


@cache
def load(file: Path) -> list[dict[str, Any]]:
    """All answerable questions, in the order of the file. Broken lines are skipped, with a warning each."""
    tasks: list[dict[str, Any]] = []
    for place, row in _rows(file):
        if isinstance(row, ValueError):
            warnings.warn(
                f"`{file}` line {place} is left out: {row}\nhint: each line is a question of MuSiQue, as JSON",
                stacklevel=2,
            )
        elif row["answerable"]:
            asked = {"question": row["question"], "paragraphs": str(file), "hops": len(row["question_decomposition"])}
            tasks.append(
                {
                    "id": f"{row['id']}-{place}",
                    "input": {**asked, "answer": row["answer"], "aliases": row["answer_aliases"]},
                }
            )
    if not tasks:
        raise ValueError(
            f"`{file}` has no question that can be answered\nhint: each line is a question of MuSiQue, as JSON"
        )
    return tasks


def paragraphs(file: str) -> tuple[str, ...]:
    """All paragraphs to search, each once. Broken lines are skipped; `load` has warned of them."""
    rows = [row for _, row in _rows(Path(file)) if not isinstance(row, ValueError)]
    texts = (f"{paragraph['title']}: {paragraph['paragraph_text']}" for row in rows for paragraph in row["paragraphs"])
    return tuple(dict.fromkeys(texts))


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Yields (line number, the row or the error)."""
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, _checked(line)
                except ValueError as error:
                    yield number, error


def _checked(line: str) -> dict[str, Any]:
    """Raises `ValueError` if the line is not a question."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    for field, kind in FIELDS.items():
        if not isinstance(row.get(field), kind):
            raise ValueError(f"`{field}` is missing or not of type `{kind.__name__}`")
    for paragraph in row["paragraphs"]:
        if not isinstance(paragraph, dict) or not all(
            isinstance(paragraph.get(field), str) for field in ("title", "paragraph_text")
        ):
            raise ValueError("a paragraph needs a `title` and a `paragraph_text`")
    return row
