"""Which problems are there, and what is an answer worth? Everything follows from (split, seed) alone."""

import math
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from stories import Problem, long_problem, random_problem

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
ROUNDED = 1e-4
"""How far off, in relation to it, an answer may be where the right one is not whole: 0.6667 is 2/3."""


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train`, `heldout` or `ood`. Structures of one split never occur in another; those of `ood` have
    four steps.
    """
    return [
        as_task(problem, f"{split}-{seed}-{index}")
        for index, problem in enumerate(problems(split, seed=seed, count=count))
    ]


def ood(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """Four steps, whatever the split: `tasks.source=tasks:ood` examines a model out of distribution."""
    return tasks("ood", seed=seed, count=count)


def problems(split: str, *, seed: int, count: int) -> list[Problem]:
    """The same tasks, as the generator knows them."""
    return [_problem(split, random.Random(f"{split}-{seed}-{index}")) for index in range(count)]


def _problem(split: str, rng: random.Random) -> Problem:
    return long_problem(rng) if split == "ood" else random_problem(rng, heldout=split != "train")


def as_task(problem: Problem, task_id: str) -> dict[str, Any]:
    """The agent reads `question`; the rest is for the grader."""
    return {
        "id": task_id,
        "input": {"question": problem.story, "answer": str(problem.answer), "steps": len(problem.steps)},
    }


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """1 if the last number of the answer is the right one, else 0. A right answer that is a word (one of several
    options) must be the last word.
    """
    said = output.get("answer") if isinstance(output, Mapping) else output
    if not isinstance(said, str):
        return 0.0
    right, told = number_of(task_input["answer"]), number_of(said)
    if right is None:
        return float(last_word(said) == last_word(task_input["answer"]))
    if told is None:
        return 0.0
    return float(told == right or (right.denominator != 1 and math.isclose(told, right, rel_tol=ROUNDED)))


def number_of(text: str) -> Fraction | None:
    """The last number in it: `so 1,776 apples` is 1776, `2/3` two thirds; None if there is none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").replace(" ", "").partition("/")
    if below and int(below) == 0:
        return None
    return Fraction(above) / int(below or 1)


def last_word(text: str) -> str:
    return (re.findall(r"\w+", text.lower()) or [""])[-1]
