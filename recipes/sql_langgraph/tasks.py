"""Tasks and the reward. Databases and questions depend on (split, seed) alone."""

import random
import sqlite3
from collections.abc import Mapping
from typing import Any

from database import comparable, is_ordered, open_database, run_query
from problems import Problem, random_problem


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train` or `heldout`. No schema and no query structure occurs in both splits."""
    return [
        as_task(problem, f"{split}-{seed}-{index}")
        for index, problem in enumerate(problems(split, seed=seed, count=count))
    ]


def problems(split: str, *, seed: int, count: int) -> list[Problem]:
    """The same tasks as `Problem`s."""
    return [
        random_problem(random.Random(f"{split}-{seed}-{index}"), heldout=split != "train") for index in range(count)
    ]


def as_task(problem: Problem, task_id: str) -> dict[str, Any]:
    """A task's row. The agent reads `question`, `schema` and the database of `setup`; the grader reads the rest."""
    row = {"question": problem.question, "schema": problem.schema.text(), "setup": problem.setups[0]}
    return {
        "id": task_id,
        "input": {**row, "kind": problem.kind, "gold": problem.gold, "second_setup": problem.setups[1]},
    }


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """1 if the query returns the same result as the gold query, on the database and on its second fill; else 0."""
    query = output.get("sql") if isinstance(output, Mapping) else output
    if not isinstance(query, str):
        return 0.0
    sources: list[Mapping[str, Any]] = [task_input]
    if "second_setup" in task_input:
        sources.append({"setup": task_input["second_setup"]})
    return float(all(_same_result(source, query, gold=task_input["gold"]) for source in sources))


def _same_result(source: Mapping[str, Any], query: str, *, gold: str) -> bool:
    """Compares rows with their multiplicity; their order counts only if gold has an ORDER BY."""
    ordered = is_ordered(gold)
    database = open_database(source)
    try:
        expected = comparable(run_query(database, gold), ordered=ordered)
        try:
            found = run_query(database, query)
        except (sqlite3.Error, ValueError):  # ValueError: a null character in the query
            return False
        return comparable(found, ordered=ordered) == expected
    finally:
        database.close()
