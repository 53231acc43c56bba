"""Word problems: a program of one to four steps, a sentence for each, and sometimes an irrelevant sentence.

    start 37, pack 48, fewer 17 →  ann has 37 eggs
                                   the baker finds 15 more        irrelevant: the question is not about the baker
                                   ann swaps each for 48
                                   ben has 17 fewer than ann
                                   how many eggs has ben          37 * 48 - 17

Whether a person is new decides the operation: `ann has 5 more than ben` is a subtraction if ann's number is known.
"""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Operation: TypeAlias = Literal["+", "-", "*", "/"]
Kind: TypeAlias = Literal["gain", "lose", "pack", "keep", "more", "fewer", "times", "more-than", "times-as"]
Aside: TypeAlias = Literal["stranger+", "stranger-", "other+", "other-"]

OPERATIONS: Mapping[Kind, Operation] = {
    "gain": "+",
    "lose": "-",
    "pack": "*",
    "keep": "/",
    "more": "+",
    "fewer": "-",
    "times": "*",
    "more-than": "-",
    "times-as": "/",
}
SENTENCES: Mapping[Kind, tuple[str, ...]] = {
    "gain": ("{a} finds {n} more", "{a} buys {n} more", "{a} gets {n} more"),
    "lose": ("{a} loses {n}", "{a} sells {n}", "{a} gives away {n}"),
    "pack": ("{a} swaps each for {n}", "{a} trades each for {n}"),
    "keep": ("{a} keeps one in {n}", "{a} saves one in {n}"),
    "more": ("{b} has {n} more than {a}",),
    "fewer": ("{b} has {n} fewer than {a}",),
    "times": ("{b} has {n} times as many as {a}",),
    "more-than": ("{a} has {n} more than {b}",),
    "times-as": ("{a} has {n} times as many as {b}",),
}
"""{a} has a known number. {b} is new; its number is known from then on."""
NEWCOMERS: tuple[Kind, ...] = ("more", "fewer", "times", "more-than", "times-as")
ASIDES: Mapping[Aside, tuple[str, ...]] = {
    "stranger+": ("{stranger} finds {n} more", "{stranger} buys {n} more", "{stranger} gets {n} more"),
    "stranger-": ("{stranger} loses {n}", "{stranger} sells {n}", "{stranger} gives away {n}"),
    "other+": ("{a} finds {n} {others}", "{a} buys {n} {others}", "{a} gets {n} {others}"),
    "other-": ("{a} loses {n} {others}", "{a} sells {n} {others}", "{a} gives away {n} {others}"),
}
"""{stranger} is not part of the problem; {others} are not what is counted."""

STRANGERS = ("the baker", "the doctor", "the farmer", "the teacher")
PEOPLE = ("ann", "ben", "cleo", "dan", "eve", "finn", "gus")
THINGS = ("apples", "books", "cards", "eggs", "pens", "shells")

LENGTHS = {1: 20, 2: 50, 3: 30}
"""Steps → percent of problems."""
LONG = 4
"""Steps of problems out of distribution."""
ASIDE_SHARE = 0.4
"""Share of problems with an irrelevant sentence."""
HELDOUT_SHARE = 5
"""One structure in this many is held out."""
SUMMANDS = range(11, 100)
FACTORS = range(3, 49)
LARGEST = 9999
"""Largest value, so that each fits into two tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    kind: Kind
    number: int

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.kind]

    def of(self, value: int) -> int:
        match self.operation:
            case "+":
                return value + self.number
            case "-":
                return value - self.number
            case "*":
                return value * self.number
            case "/":
                return value // self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    start: int
    steps: tuple[Step, ...]
    aside: Aside | None
    """The kind of the irrelevant sentence; None if there is none."""
    aside_after: int
    """The step that it follows; 0: the first sentence."""
    aside_number: int
    story: str
    """The agent's prompt."""

    @property
    def answer(self) -> int:
        value = self.start
        for step in self.steps:
            value = step.of(value)
        return value


def random_problem(rng: random.Random, *, heldout: bool) -> Problem:
    """A problem of one to three steps, with a structure of the requested split."""
    while True:
        problem = _draw(rng, length=rng.choices(list(LENGTHS), list(LENGTHS.values()))[0])
        if problem is not None and is_heldout(structure(problem)) == heldout:
            return problem


def long_problem(rng: random.Random) -> Problem:
    """A problem out of distribution: one step more than training ever shows."""
    while True:
        problem = _draw(rng, length=LONG)
        if problem is not None:
            return problem


def structure(problem: Problem) -> str:
    """The program: the kinds of its steps in order, without words and numbers."""
    return " ".join(step.kind for step in problem.steps)


def is_heldout(structure: str) -> bool:
    """Whether a structure is held out. Single steps never are: longer programs are built from them."""
    return " " in structure and zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0


def _draw(rng: random.Random, *, length: int) -> Problem | None:
    """None if the numbers do not work out: a value out of range, no divisor, or a number that occurs twice."""
    start = value = rng.choice(SUMMANDS)
    steps: list[Step] = []
    for kind in rng.choices(list(OPERATIONS), k=length):
        numbers = _numbers(OPERATIONS[kind], value)
        if not numbers:
            return None
        steps.append(Step(kind=kind, number=rng.choice(numbers)))
        value = steps[-1].of(value)
    aside = rng.choice(list(ASIDES)) if rng.random() < ASIDE_SHARE else None
    after, beside = rng.randint(0, length), rng.choice(SUMMANDS)
    named = [start, *(step.number for step in steps), beside]
    if len(set(named)) < len(named):
        return None
    story = _story(start, steps, aside, after, beside, rng)
    return Problem(start=start, steps=tuple(steps), aside=aside, aside_after=after, aside_number=beside, story=story)


def _numbers(operation: Operation, value: int) -> list[int]:
    match operation:
        case "+":
            return [n for n in SUMMANDS if value + n <= LARGEST]
        case "-":
            return [n for n in SUMMANDS if n < value]
        case "*":
            return [n for n in FACTORS if value * n <= LARGEST]
        case "/":
            return [n for n in FACTORS if value % n == 0 and value > n]


def _story(start: int, steps: list[Step], aside: Aside | None, after: int, beside: int, rng: random.Random) -> str:
    people = rng.sample(PEOPLE, len(steps) + 1)
    stranger, holder = rng.choice(STRANGERS), people.pop()
    things, others = rng.sample(THINGS, 2)
    sentences = [f"{holder} has {start} {things}"]
    for place in range(len(steps) + 1):
        if place > 0:
            step = steps[place - 1]
            new = people.pop() if step.kind in NEWCOMERS else holder
            sentences.append(rng.choice(SENTENCES[step.kind]).format(a=holder, b=new, n=step.number))
            holder = new
        if aside is not None and place == after:
            sentences.append(rng.choice(ASIDES[aside]).format(a=holder, stranger=stranger, n=beside, others=others))
    return "\n".join([*sentences, f"how many {things} has {holder}"])
