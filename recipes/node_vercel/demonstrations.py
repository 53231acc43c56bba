"""Demonstrations for the warm start: whole conversations of the agent with a demonstrator who is often wrong.

The demonstrator follows the agent's own steps in real records. Each kind of slip occurs in a fixed share of cases, so
imitation alone reaches about a fifth of the possible reward.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks import Problem, random_problem

INSTRUCTIONS = "look up records, then answer"
"""The instructions of agent.mjs."""
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
"""The tool of agent.mjs, as the SDK describes it to the model."""
SLIPS: Mapping[str, float] = {"asker": 0.3, "wanted": 0.2, "price": 0.58, "early": 0.12}
"""Share of cases with each slip. `asker`: looks up a record of the asker. `wanted`: looks up `wants`, not the deed.
`price`: looks up the price, not the field. `early`: answers with the thing itself. Above one half a slip is a habit, so
greedy decoding has it, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    slips: Mapping[str, bool | None]
    """Whether each slip was made; None if it was not possible."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Conversations on tasks of the split `train`, none of them from `tasks`. `perfect`: without slips."""
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
