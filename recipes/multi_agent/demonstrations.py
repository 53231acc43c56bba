"""What is the model shown before it learns from reward? The work of three demonstrators, each of whom is often wrong in
his own way.

Their slips are systematic: each kind is made in a fixed share of cases, so that imitation alone ends far below what
could be had, and none of the three can make up for the other two.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent import AGAIN
from tasks import Problem, Step, plan_of, random_problem, sums_of

SLIPS: Mapping[str, float] = {"sign": 0.3, "order": 0.35, "sum": 0.15, "last": 0.55, "verdict": 0.1, "good": 0.5}
"""Planner: plus for minus, or minus for plus; the steps the wrong way round. Solver: one off, in each sum; one too many
in the last. Critic: another verdict; `good`, whatever there is. More than half of the time is a habit: greedy has it,
too.
"""
VERDICTS = ("good", "plan", "sums")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation of one role."""

    role: str
    messages: tuple[dict[str, str], ...]


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Three for each of `count` riddles of the split `train`, apart from those of `tasks`. `perfect` leaves all slips
    out.
    """
    return [
        demonstration
        for index in range(count)
        for demonstration in _demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS)
    ]


def _demonstrate(rng: random.Random, slips: Mapping[str, float]) -> list[Demonstration]:
    problem = random_problem(rng, heldout=False)
    plans = [planned(problem, rng, slips) for _ in range(2)]
    sums = [summed(plans[0], rng, slips) for _ in range(2)]
    # The critic's work is to be found wrong in all ways, also where nobody slips.
    plan = planned(problem, rng, SLIPS)
    done = summed(plan, rng, SLIPS)
    work = f"{problem.riddle}\nplan {plan}\nsums {done}"
    return [
        _conversation("plan", problem.riddle, plans[0], AGAIN, plans[1]),
        _conversation("solve", plans[0], sums[0], AGAIN, sums[1]),
        _conversation("check", work, judged(problem, plan, done, rng, slips)),
    ]


def planned(problem: Problem, rng: random.Random, slips: Mapping[str, float]) -> str:
    steps = list(problem.steps)
    if rng.random() < slips.get("sign", 0):
        steps = [_turned(step) for step in steps]
    if rng.random() < slips.get("order", 0):
        steps.reverse()
    return plan_of(replace(problem, steps=tuple(steps)))


def _turned(step: Step) -> Step:
    return replace(step, operation={"+": "-", "-": "+", "*": "*"}[step.operation])


def summed(plan: str, rng: random.Random, slips: Mapping[str, float]) -> str:
    first, *rest = plan.split()
    value, found = int(first), list[str]()
    for operation, number in zip(rest[::2], rest[1::2], strict=True):
        value = Step(operation=operation, number=int(number)).of(value)
        if rng.random() < slips.get("sum", 0):
            value += rng.choice((-1, 1))
        found.append(str(value))
    if rng.random() < slips.get("last", 0):
        found[-1] = str(value + 1)
    return " ".join(found)


def judged(problem: Problem, plan: str, sums: str, rng: random.Random, slips: Mapping[str, float]) -> str:
    """The right verdict, or another."""
    if rng.random() < slips.get("good", 0):
        return "good"
    leads_there = sums_of(plan).split()[-1] == sums_of(plan_of(problem)).split()[-1]
    right = "plan" if not leads_there else "sums" if sums != sums_of(plan) else "good"
    return (
        rng.choice([verdict for verdict in VERDICTS if verdict != right])
        if rng.random() < slips.get("verdict", 0)
        else right
    )


def _conversation(role: str, *said: str) -> Demonstration:
    """What the user and the assistant say in turn."""
    told = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    return Demonstration(role=role, messages=({"role": "system", "content": role}, *told))
