"""Load tasks from a function `f(split, seed=…, count=…)`, or from a JSONL file with `input` and `split` in each row."""

import codecs
import hashlib
import random
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from lightningrl import plugins
from lightningrl.config import TasksConfig
from lightningrl.errors import LightningError, UserError, meant
from lightningrl.types import Task

SPLITS = ("train", "heldout")
ROW = 'a row is a line such as {"input": {…}, "split": "train"}, or "heldout"'


def load_tasks(config: TasksConfig, split: str, *, seed: int, count: int, root: Path) -> list[Task]:
    """`count` tasks of a split. The seed determines a function's tasks, and the order of a file's tasks."""
    if config.source.endswith((".jsonl", ".json")):
        rows = [row for row in _file(root / config.source) if row.get("split", "train") == split]
        if not rows:
            raise UserError(f"no task of split `{split}` in `{root / config.source}`", hint=ROW)
        if split == "train":
            random.Random(seed).shuffle(rows)
        rows = (rows * -(-count // len(rows)))[:count] if split == "train" else rows[:count]
    else:
        rows = _made(config.source, split, seed=seed, count=count, root=root)
    return [Task(id=str(row.get("id", index)), input=row["input"], split=split) for index, row in enumerate(rows)]


def asked(task: Task) -> bytes:
    """The input of a task as bytes that are equal for equal inputs."""
    return msgspec.json.encode(task.input, order="deterministic")


def in_both_splits(config: TasksConfig, *, seed: int, count: int, root: Path) -> list[Task]:
    """Held-out tasks that are also training tasks. Of a function's training tasks, `count` are compared."""
    if config.source.endswith((".jsonl", ".json")):
        count = len(_file(root / config.source))
    trained = {asked(task) for task in load_tasks(config, "train", seed=seed, count=count, root=root)}
    heldout = load_tasks(config, "heldout", seed=config.seed, count=config.heldout, root=root)
    return [task for task in heldout if asked(task) in trained]


def _made(source: str, split: str, *, seed: int, count: int, root: Path) -> list[dict[str, Any]]:
    """Rows from a recipe's function. Any exception in it becomes a `UserError`."""
    make = plugins.load(source, kind="tasks", root=root)
    try:
        rows = list(make(split, seed=seed, count=count))
    except LightningError:
        raise
    except Exception as error:
        reason, _, hint = f"{type(error).__name__}: {error}".partition("\nhint: ")
        raise UserError(
            f"`{source}` failed on split `{split}`: {reason}",
            hint=hint or "the function is called as f(split, seed=…, count=…)",
        ) from error
    if not rows or not all(isinstance(row, dict) and "input" in row for row in rows):
        raise UserError(
            f"`{source}` gave no tasks for split `{split}`", hint='the function must return a list of {"input": {…}}'
        )
    return rows


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _file(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        return _rows(path, path.stat().st_mtime_ns)
    except FileNotFoundError as error:
        raise UserError(
            f"no task file at `{path}`", hint="`tasks.source` is relative to the recipe's folder"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot read the task file `{path}`: {error.strerror}", hint="`tasks.source` names a JSONL file"
        ) from error


@lru_cache(maxsize=2)
def _rows(path: Path, changed_ns: int) -> tuple[dict[str, Any], ...]:
    """All rows that are tasks. Every other line gives a warning. A file is read again only if it has changed."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if line.strip():
            try:
                rows.append(_task_of(line))
            except ValueError as error:
                warnings.warn(f"`{path}` line {number} is left out: {error}\nhint: {ROW}", stacklevel=3)
    return tuple(rows)


def _task_of(line: bytes) -> dict[str, Any]:
    """The row in a line. Raises `ValueError` if it is not a task."""
    try:
        row = msgspec.json.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("too many brackets within brackets") from error
    if not isinstance(row, dict):
        raise ValueError(f"a `{type(row).__name__}`, not an object")
    if not isinstance(row.get("input"), dict):
        raise ValueError(
            f"`input` is a `{type(row['input']).__name__}`, not an object" if "input" in row else "`input` is missing"
        )
    split = row.get("split", SPLITS[0])
    if split not in SPLITS:
        raise ValueError(f"there is no split `{split}`: {meant(str(split), SPLITS)}")
    return row
