"""Tasks and the reward. Everything depends on (split, seed) alone.

question   ben asks: price of what ann returned
records    ann returned      blue lamp
           blue lamp price   14
           …                 and more, for everything that the two have done
answer     14
"""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEOPLE = ("ann", "ben", "cleo", "dan", "eva", "finn")
DEEDS = ("bought", "rents", "returned", "wants")
THINGS = tuple(
    f"{colour} {kind}"
    for colour in ("blue", "green", "red", "white")
    for kind in ("book", "clock", "cup", "lamp", "rope", "vase")
)
FIELDS = ("price", "shelf", "stock", "weight")
NUMBERS = tuple(str(number) for number in range(10, 60))
HELDOUT_SHARE = 5
"""One structure in this many is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    asker: str
    person: str
    """The person whose deed names the thing."""
    deed: str
    field: str
    records: Mapping[str, str]
    """`ann returned` → a thing, for all deeds of the two; `blue lamp price` → a number, for all fields of a thing. No
    value occurs twice.
    """

    @property
    def question(self) -> str:
        return f"{self.asker} asks: {self.field} of what {self.person} {self.deed}"

    @property
    def thing(self) -> str:
        return self.records[f"{self.person} {self.deed}"]

    @property
    def answer(self) -> str:
        return self.records[f"{self.thing} {self.field}"]


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train` or `heldout`. No combination of field, person and deed occurs in both splits."""
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
    """A task's row. The agent reads `question` and looks up `records`; the grader reads the rest."""
    return {
        "id": task_id,
        "input": {"question": problem.question, "records": dict(problem.records), "answer": problem.answer},
    }


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """1 for the right number, else 0."""
    answer = output.get("answer") if isinstance(output, Mapping) else output
    return float(isinstance(answer, str) and answer.strip() == task_input["answer"])


def random_problem(rng: random.Random, *, heldout: bool) -> Problem:
    while True:
        problem = _draw(rng)
        if is_heldout(structure(problem)) == heldout:
            return problem


def structure(problem: Problem) -> str:
    """Field, person and deed; neither the asker nor the records."""
    return f"{problem.field} {problem.person} {problem.deed}"


def is_heldout(structure: str) -> bool:
    return zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0


def _draw(rng: random.Random) -> Problem:
    asker, person = rng.sample(PEOPLE, 2)
    done = [f"{name} {deed}" for name in (asker, person) for deed in DEEDS]
    records = dict(zip(done, rng.sample(THINGS, len(done)), strict=True))
    known = [f"{thing} {field}" for thing in records.values() for field in FIELDS]
    records |= zip(known, rng.sample(NUMBERS, len(known)), strict=True)
    return Problem(asker=asker, person=person, deed=rng.choice(DEEDS), field=rng.choice(FIELDS), records=records)
