"""What is the model shown before it learns from reward? Whole conversations of the agent with a demonstrator who is often wrong.

He goes through the agent's own steps in real records. His slips are systematic: each is made in a fixed share of cases, so that imitation alone ends
at about a fifth of what could be had.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks import Problem, random_problem, text_of

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
SLIPS: Mapping[str, float] = {"asker": 0.3, "thing": 0.58, "number": 0.58, "early": 0.12}
"""To look up who asks, not who is asked about; to go on with the first thing of a record, whatever it is; to answer with its first number;
to answer with the thing itself. More than half of the time is a habit: greedy has it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    slips: Mapping[str, bool | None]
    """Whether each was made; None: there was no occasion."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Over tasks of the split `train`, apart from those of `tasks`. `perfect` leaves all slips out: what the model could learn at best."""
    return [_demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS) for index in range(count)]


def _demonstrate(rng: random.Random, shares: Mapping[str, float]) -> Demonstration:
    problem = random_problem(rng, heldout=False)
    slips: dict[str, bool | None] = {kind: rng.random() < shares.get(kind, 0.0) for kind in SLIPS}
    person = problem.asker if slips["asker"] else problem.person
    thing = _read(problem.records[person], problem.deed, first=bool(slips["thing"]))
    looked_up, answer = [person], thing
    if slips["early"]:
        slips["number"] = None
    else:
        looked_up.append(thing)
        answer = _read(problem.records[thing], problem.field, first=bool(slips["number"]))
    messages: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": problem.question}]
    for place, name in enumerate(looked_up):
        function = {"name": "look_up", "arguments": json.dumps({"name": name})}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"call_{place}", "type": "function", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "content": text_of(problem.records[name])})
    messages.append({"role": "assistant", "content": answer})
    return Demonstration(problem=problem, messages=tuple(messages), slips=slips)


def _read(record: Mapping[str, str], key: str, *, first: bool) -> str:
    """What a record says; where it says nothing of the kind, its first line."""
    values = list(record.values())
    return values[0] if first else record.get(key, values[0])
