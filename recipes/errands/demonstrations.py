"""Demonstrations for the warm start: whole conversations of the agent with a demonstrator who is often wrong.

The demonstrator follows the agent's own steps in real houses. Each kind of decision is wrong in a fixed share of cases,
so imitation alone reaches about a quarter of the possible reward.
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
"""Share of wrong decisions of each kind. `room`: go elsewhere first. `hasty`: take a thing before being in its room.
`first`: take the first thing in sight. `again`: take it once more. `next`: send it to the person of the next errand.
Above one half a slip is a habit, so greedy decoding has it, too.
"""
DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    sent: tuple[tuple[str, str], ...]


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Conversations on tasks of the split `train`, none of them from `tasks`. `perfect`: without slips."""
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
    """The demonstrator's tool calls for one errand."""

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
