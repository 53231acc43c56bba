"""Which questions is the assistant asked, and what is an answer worth? Everything follows from (split, seed) alone.

question   ben asks: price of what ann returned
records    ann         bought red cup, returned blue lamp, wants green book
           blue lamp   shelf 31, price 14, stock 22
           …           and so for ben, and all that the two have to do with
answer     14
"""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEOPLE = ("ann", "ben", "cleo", "dan", "eva", "finn")
DEEDS = ("bought", "rents", "returned", "wants")
THINGS = tuple(f"{colour} {kind}" for colour in ("blue", "green", "red", "white") for kind in ("book", "clock", "cup", "lamp", "rope", "vase"))
FIELDS = ("price", "shelf", "stock", "weight")
NUMBERS = tuple(str(number) for number in range(10, 40))
LINES = 3
"""In every record."""
HELDOUT_SHARE = 5
"""One structure in this many is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    asker: str
    person: str
    """Who has to do with the thing that is meant."""
    deed: str
    field: str
    records: Mapping[str, Mapping[str, str]]
    """Of each person: deed → thing. Of each thing: field → number. No two things, and no two numbers, are the same."""

    @property
    def question(self) -> str:
        return f"{self.asker} asks: {self.field} of what {self.person} {self.deed}"

    @property
    def thing(self) -> str:
        return self.records[self.person][self.deed]

    @property
    def answer(self) -> str:
        return self.records[self.thing][self.field]


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train` or `heldout`. Who is asked about, and what about them, is never the same in both."""
    return [as_task(problem, f"{split}-{seed}-{index}") for index, problem in enumerate(problems(split, seed=seed, count=count))]


def problems(split: str, *, seed: int, count: int) -> list[Problem]:
    """The same tasks, as the generator knows them."""
    return [random_problem(random.Random(f"{split}-{seed}-{index}"), heldout=split != "train") for index in range(count)]


def as_task(problem: Problem, task_id: str) -> dict[str, Any]:
    """The agent reads `question` and looks things up in `records`; the rest is for the grader."""
    records = {name: text_of(record) for name, record in problem.records.items()}
    return {"id": task_id, "input": {"question": problem.question, "records": records, "answer": problem.answer}}


def text_of(record: Mapping[str, str]) -> str:
    """A record as the tool shows it."""
    return "\n".join(f"{key} {value}" for key, value in record.items())


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """1 for the right number; else 0."""
    answer = output.get("answer") if isinstance(output, Mapping) else output
    return float(isinstance(answer, str) and answer.strip() == task_input["answer"])


def random_problem(rng: random.Random, *, heldout: bool) -> Problem:
    while True:
        problem = _draw(rng)
        if is_heldout(structure(problem)) == heldout:
            return problem


def structure(problem: Problem) -> str:
    """What is asked about whom; not who asks, nor what the records say."""
    return f"{problem.field} {problem.person} {problem.deed}"


def is_heldout(structure: str) -> bool:
    return zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0


def _draw(rng: random.Random) -> Problem:
    people = rng.sample(PEOPLE, 2)
    things = rng.sample(THINGS, len(people) * LINES)
    numbers = rng.sample(NUMBERS, len(things) * LINES)
    records = {person: dict(zip(rng.sample(DEEDS, LINES), things[i * LINES :], strict=False)) for i, person in enumerate(people)}
    records |= {thing: dict(zip(rng.sample(FIELDS, LINES), numbers[i * LINES :], strict=False)) for i, thing in enumerate(things)}
    deed = rng.choice(list(records[people[1]]))
    field = rng.choice(list(records[records[people[1]][deed]]))
    return Problem(asker=people[0], person=people[1], deed=deed, field=field, records=records)
