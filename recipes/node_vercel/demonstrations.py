"""What is the model shown before it learns from reward? Whole conversations of the agent with a demonstrator who is
often wrong.

He goes through the agent's own steps in real records. His slips are systematic: each is made in a fixed share of cases,
so that imitation alone ends at about a fifth of what could be had.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks import Problem, random_problem

INSTRUCTIONS = "look up records, then answer"
"""Those of agent.mjs."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "read a record",
            "parameters": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    }
]
"""The tool of agent.mjs, as the SDK tells the model of it."""
SLIPS: Mapping[str, float] = {"asker": 0.3, "wanted": 0.2, "price": 0.58, "early": 0.12}
"""To look up what the one who asks has done; to look up what is wanted, whatever was asked about; to look up the price,
whatever was asked for; to answer with the thing itself. More than half of the time is a habit: greedy has it, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    slips: Mapping[str, bool | None]
    """Whether each was made; None: there was no occasion."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Over tasks of the split `train`, apart from those of `tasks`. `perfect` leaves all slips out: what the model
    could learn at best.
    """
    return [
        _demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS) for index in range(count)
    ]


def _demonstrate(rng: random.Random, shares: Mapping[str, float]) -> Demonstration:
    problem = random_problem(rng, heldout=False)
    slips: dict[str, bool | None] = {kind: rng.random() < shares.get(kind, 0.0) for kind in SLIPS}
    person = problem.asker if slips["asker"] else problem.person
    looked_up = [f"{person} {'wants' if slips['wanted'] else problem.deed}"]
    answer = problem.records[looked_up[0]]
    if slips["early"]:
        slips["price"] = None
    else:
        looked_up.append(f"{answer} {'price' if slips['price'] else problem.field}")
        answer = problem.records[looked_up[1]]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": problem.question},
    ]
    for place, name in enumerate(looked_up):
        function = {"name": "look_up", "arguments": json.dumps({"name": name})}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"call_{place}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "content": problem.records[name]})
    messages.append({"role": "assistant", "content": answer})
    return Demonstration(problem=problem, messages=tuple(messages), slips=slips)
