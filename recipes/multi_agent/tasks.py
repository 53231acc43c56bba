"""Tasks and the reward. Everything depends on (split, seed) alone.

ben has 2 more than ann
dan has 2 times ben          plan   3 + 2 * 2
ann has 3                    sums   5 10
what has dan
"""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEOPLE = ("ann", "ben", "cleo", "dan", "eva")
WORDS = {"+": "more than", "-": "less than", "*": "times"}
NUMBERS = {"+": (1, 2, 3, 4), "-": (1, 2), "*": (2,)}
FIRST = (3, 4, 5, 6)
HELDOUT_SHARE = 5
"""One structure in this many is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    operation: str
    number: int

    def of(self, value: int) -> int:
        """The result of the step."""
        return {"+": value + self.number, "-": value - self.number, "*": value * self.number}[self.operation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    people: tuple[str, ...]
    """People in the order of the steps."""
    first: int
    steps: tuple[Step, ...]
    riddle: str
    """The team's prompt."""


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train` or `heldout`. No combination of people and operations occurs in both splits."""
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
    """A task's row. The team reads `riddle`; the grader reads the rest."""
    return {"id": task_id, "input": {"riddle": problem.riddle, "answer": sums_of(plan_of(problem)).split()[-1]}}


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """1 for the right number, else 0."""
    answer = output.get("answer") if isinstance(output, Mapping) else output
    return float(answer == task_input["answer"])


def plan_of(problem: Problem) -> str:
    """The right plan: `3 + 2 * 2`, to be evaluated from the left."""
    return " ".join([str(problem.first), *(f"{step.operation} {step.number}" for step in problem.steps)])


def sums_of(plan: str) -> str:
    """The right sums of a plan: the value after each step."""
    first, *rest = plan.split()
    value, found = int(first), list[str]()
    for operation, number in zip(rest[::2], rest[1::2], strict=True):
        value = Step(operation=operation, number=int(number)).of(value)
        found.append(str(value))
    return " ".join(found)


def random_problem(rng: random.Random, *, heldout: bool) -> Problem:
    while True:
        problem = _draw(rng)
        if is_heldout(structure(problem)) == heldout:
            return problem


def structure(problem: Problem) -> str:
    """The people in order, and the operations between them; no numbers."""
    return " ".join([*problem.people, *(step.operation for step in problem.steps)])


def is_heldout(structure: str) -> bool:
    return zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0


def _draw(rng: random.Random) -> Problem:
    people = tuple(rng.sample(PEOPLE, 3))
    steps: list[Step] = []
    for operation in rng.sample(sorted(WORDS), 2):
        steps.append(Step(operation=operation, number=rng.choice(NUMBERS[operation])))
    first = rng.choice(FIRST)
    told = [f"{people[0]} has {first}"]
    told += [f"{people[i + 1]} has {step.number} {WORDS[step.operation]} {people[i]}" for i, step in enumerate(steps)]
    return Problem(people=people, first=first, steps=tuple(steps), riddle="\n".join([*told, f"what has {people[-1]}"]))
