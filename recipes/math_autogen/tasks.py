"""Tasks and the reward. Everything depends on (split, seed) alone."""

import math
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from stories import Problem, long_problem, random_problem

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
ROUNDED = 1e-4
"""Relative tolerance if the right answer is not whole: 0.6667 counts as 2/3."""


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train`, `heldout` or `ood`. No structure occurs in two splits; `ood` takes four steps."""
    return [
        as_task(problem, f"{split}-{seed}-{index}")
        for index, problem in enumerate(problems(split, seed=seed, count=count))
    ]


def ood(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """Four steps, whatever the split: `tasks.source=tasks:ood` evaluates a model out of distribution."""
    return tasks("ood", seed=seed, count=count)


def problems(split: str, *, seed: int, count: int) -> list[Problem]:
    """The same tasks as `Problem`s."""
    return [_problem(split, random.Random(f"{split}-{seed}-{index}")) for index in range(count)]


def _problem(split: str, rng: random.Random) -> Problem:
    return long_problem(rng) if split == "ood" else random_problem(rng, heldout=split != "train")


def as_task(problem: Problem, task_id: str) -> dict[str, Any]:
    """A task's row. The agent reads `question`; the grader reads the rest."""
    return {
        "id": task_id,
        "input": {"question": problem.story, "answer": str(problem.answer), "steps": len(problem.steps)},
    }


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """1 if the answer's last number is right, else 0. A right answer that is a word must be the answer's last word."""
    answer = output.get("answer") if isinstance(output, Mapping) else output
    if not isinstance(answer, str):
        return 0.0
    right, given = number_of(task_input["answer"]), number_of(answer)
    if right is None:
        return float(last_word(answer) == last_word(task_input["answer"]))
    if given is None:
        return 0.0
    return float(given == right or (right.denominator != 1 and math.isclose(given, right, rel_tol=ROUNDED)))


def number_of(text: str) -> Fraction | None:
    """The last number of a text: 1776 for `so 1,776 apples`, two thirds for `2/3`. None if there is none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").replace(" ", "").partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / int(below or 1)


def last_word(text: str) -> str:
    return (re.findall(r"\w+", text.lower()) or [""])[-1]
