"""What is the model shown before it learns from reward? Whole conversations of the agent with a demonstrator who is
often wrong.

He goes through the agent's own steps in real houses. His slips are systematic: each kind of decision is taken wrongly
in a fixed share of cases, so that imitation alone ends at about a quarter of what could be had.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent import MAX_CALLS, SYSTEM
from house import ROOMS, House
from tasks import Errand, Problem, random_problem

SLIPS: Mapping[str, float] = {"room": 0.2, "hasty": 0.15, "first": 0.6, "again": 0.15, "next": 0.55}
"""Share of the decisions of a kind that are taken for a wrong reason: to go elsewhere first; to take a thing before
being where it is; to take the first thing in sight; to take it once more; to send it to whom the next errand is for.
More than half of the time is a habit: greedy has it, too.
"""
DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    sent: tuple[tuple[str, str], ...]


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Over tasks of the split `train`, apart from those of `tasks`. `perfect` leaves all slips out: what the model
    could learn at best.
    """
    return [_demonstrate(random.Random(f"demonstration-{seed}-{index}"), perfect=perfect) for index in range(count)]


def _demonstrate(rng: random.Random, *, perfect: bool) -> Demonstration:
    problem = random_problem(rng, heldout=False)
    house = House(problem.rooms, [[errand.person, errand.name] for errand in problem.errands])
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.request},
    ]
    slips, following = {} if perfect else SLIPS, (*problem.errands[1:], problem.errands[0])
    wishes = [
        wish
        for errand, after in zip(problem.errands, following, strict=True)
        for wish in _wishes(problem, errand, after, slips, rng)
    ]
    for place, (tool, arguments) in enumerate(wishes[: MAX_CALLS - 1]):
        function = {"name": tool, "arguments": json.dumps(arguments)}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"call_{place}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "content": house.call(tool, arguments)})
    messages.append({"role": "assistant", "content": DONE})
    return Demonstration(
        problem=problem, messages=tuple(messages), sent=tuple((person, thing) for person, thing in house.sent)
    )


def _wishes(
    problem: Problem, errand: Errand, after: Errand, slips: Mapping[str, float], rng: random.Random
) -> list[tuple[str, dict[str, str]]]:
    """What the demonstrator does for one errand."""

    def slipped(kind: str) -> bool:
        return rng.random() < slips.get(kind, 0.0)

    elsewhere = [room for room in ROOMS if room != errand.room]
    thing = problem.rooms[errand.room][0] if slipped("first") else errand.name
    person = after.person if slipped("next") else errand.person
    wishes = [("take", {"thing": thing})] if slipped("hasty") else []
    wishes += [("go", {"room": rng.choice(elsewhere)})] if slipped("room") else []
    wishes += [("go", {"room": errand.room}), ("take", {"thing": thing})]
    wishes += [("take", {"thing": thing})] if slipped("again") else []
    return [*wishes, ("send", {"person": person})]
