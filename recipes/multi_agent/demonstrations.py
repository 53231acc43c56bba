"""Demonstrations for the warm start: the work of three demonstrators, each often wrong in a different way.

Each kind of slip occurs in a fixed share of cases, so imitation alone ends far below the possible reward, and no role
can make up for the other two.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent import AGAIN
from tasks import Problem, Step, plan_of, random_problem, sums_of

SLIPS: Mapping[str, float] = {"sign": 0.3, "order": 0.35, "sum": 0.15, "last": 0.55, "verdict": 0.1, "good": 0.5}
"""Share of cases with each slip. Planner: `sign` swaps plus and minus, `order` reverses the steps. Solver: `sum` is one
off, in any sum; `last` is one too many, in the last sum. Critic: `verdict` is another verdict, `good` says `good` to
all work. Above one half a slip is a habit, so greedy decoding has it, too.
"""
VERDICTS = ("good", "plan", "sums")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation of one role."""

    role: str
    messages: tuple[dict[str, str], ...]


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Three for each of `count` riddles of the split `train`, none of them from `tasks`. `perfect`: without slips."""
    return [
        demonstration
        for index in range(count)
        for demonstration in _demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS)
    ]


def _demonstrate(rng: random.Random, slips: Mapping[str, float]) -> list[Demonstration]:
    problem = random_problem(rng, heldout=False)
    plans = [planned(problem, rng, slips) for _ in range(2)]
    sums = [summed(plans[0], rng, slips) for _ in range(2)]
    # The critic must see every kind of mistake, even if nobody else slips.
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
    """The right verdict, or another one."""
    if rng.random() < slips.get("good", 0):
        return "good"
    leads_there = sums_of(plan).split()[-1] == sums_of(plan_of(problem)).split()[-1]
    right = "good" if sums == sums_of(plan) else "sums"
    if not leads_there:
        right = "plan"
    if rng.random() < slips.get("verdict", 0):
        return rng.choice([verdict for verdict in VERDICTS if verdict != right])
    return right


def _conversation(role: str, *texts: str) -> Demonstration:
    """A conversation of user and assistant in turn."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return Demonstration(role=role, messages=({"role": "system", "content": role}, *turns))
