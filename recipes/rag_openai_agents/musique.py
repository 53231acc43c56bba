"""How does MuSiQue (arXiv 2108.00573) become tasks? From its own files, as they are downloaded, to rows that agent and
reward understand.

    folder/musique_ans_v1.0_train.jsonl    a question a line, with 20 paragraphs to each
    folder/musique_ans_v1.0_dev.jsonl

In a recipe of your own: `source = "musique:tasks"`, and the folder in the environment variable MUSIQUE. The agent
searches in the paragraphs of all questions of a file. A line that is broken is named in a warning and left out;
questions that cannot be answered are left out, too.
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
    """`count` questions of the folder that MUSIQUE names, in an order that follows from the seed; all over again if
    there are fewer.
    """
    folder = os.environ.get("MUSIQUE")
    if not folder:
        raise ValueError(
            "the environment variable `MUSIQUE` is not set\nhint: let it name the folder that holds musique_ans_v1.0_train.jsonl"
        )
    rows = load(Path(folder) / FILES["train" if split == "train" else "heldout"])
    order = random.Random(f"{split}-{seed}").sample(rows, len(rows))
    return (order * -(-count // len(order)))[:count]


@cache
def load(file: Path) -> list[dict[str, Any]]:
    """Every question that can be answered, in the order of the file. Lines that are broken are named in warnings, once."""
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
    """All that can be found, each paragraph once. Broken lines were named when the tasks were made."""
    rows = [row for _, row in _rows(Path(file)) if not isinstance(row, ValueError)]
    texts = (f"{paragraph['title']}: {paragraph['paragraph_text']}" for row in rows for paragraph in row["paragraphs"])
    return tuple(dict.fromkeys(texts))


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """(number of the line, what it holds or what is wrong with it)."""
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, _checked(line)
                except ValueError as error:
                    yield number, error


def _checked(line: str) -> dict[str, Any]:
    """Raises `ValueError` for what is no question."""
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
