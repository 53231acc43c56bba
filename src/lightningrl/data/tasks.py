"""Where tasks come from: a pure function `f(split, seed=…, count=…)`, or a JSONL file with `input` and `split` in each row."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from lightningrl import plugins
from lightningrl.config import TasksConfig
from lightningrl.errors import LightningError, UserError
from lightningrl.types import Task


def load_tasks(config: TasksConfig, split: str, *, seed: int, count: int, root: Path) -> list[Task]:
    """`count` tasks of a split. A function makes fresh ones for every seed; a file is gone through in an order that follows the seed."""
    if config.source.endswith((".jsonl", ".json")):
        rows = [row for row in _read_jsonl(root / config.source) if row.get("split", "train") == split]
        if not rows:
            raise UserError(f"no task of split `{split}` in `{config.source}`", hint="rows need a field `split`: train or heldout")
        if split == "train":
            random.Random(seed).shuffle(rows)
        rows = (rows * -(-count // len(rows)))[:count] if split == "train" else rows[:count]
    else:
        rows = _made(config.source, split, seed=seed, count=count, root=root)
    return [Task(id=str(row.get("id", index)), input=row["input"], split=split) for index, row in enumerate(rows)]


def _made(source: str, split: str, *, seed: int, count: int, root: Path) -> list[dict[str, Any]]:
    """Rows of a recipe's own function. Whatever it raises is its own failure."""
    make = plugins.load(source, kind="tasks", root=root)
    try:
        rows = list(make(split, seed=seed, count=count))
    except LightningError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"`{source}` failed on split `{split}`: {reason}", hint="it is called as f(split, seed=…, count=…)") from error
    if not rows or not all(isinstance(row, dict) and "input" in row for row in rows):
        raise UserError(f"`{source}` gave no tasks for split `{split}`", hint='it returns a list of {"input": {…}}')
    return rows


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(f"no task file at `{path}`", hint="`tasks.source` is relative to the recipe's folder") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            row["input"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"`{path}` line {number} is not a task: {error}", hint='a row looks like {"input": {…}, "split": "train"}') from error
        rows.append(row)
    return rows
