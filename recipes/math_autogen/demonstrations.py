"""What is the model shown before it learns from reward? Whole conversations of the agent with a demonstrator who is
often wrong.

He works on the agent's own calculator, a step at a time: `37 + 5`, then `42 * 12`. His slips are systematic: each kind
is made in a fixed share of the problems that tempt to it.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent import SYSTEM, TOOL_ITERATIONS
from calculator import calculator
from stories import Problem, Step, random_problem

SLIPS: Mapping[str, float] = {"brackets": 0.45, "aside": 0.45, "short": 0.15, "start": 0.56, "again": 0.05}
"""Share of problems in which he slips, where he can: he writes it all in one go, as if `37 + 5 * 12` were worked off
from the left; counts in what is beside the point; leaves out the last step; ends with the number that he started from;
or asks the calculator again until it is taken away, which does no harm. More than half of the time is a habit: greedy
has it, too. No slip is another's mirror.
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": calculator.__doc__,
            "parameters": {
                "type": "object",
                "properties": {"expression": {"title": "Expression", "type": "string"}},
                "required": ["expression"],
                "additionalProperties": False,
            },
            "strict": False,
        },
    }
]
"""As AutoGen sends what the server lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    slips: frozenset[str]
    """Those that were made."""

    @property
    def reflects(self) -> bool:
        """Whether the last answer is given without tools, as all rounds of tool calls are used up."""
        return sum(message["role"] == "tool" for message in self.messages) == TOOL_ITERATIONS

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Over problems of the split `train`, apart from those of `tasks`. `perfect` leaves all slips out: what the model
    could learn at best.
    """
    return [
        _demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS) for index in range(count)
    ]


def _demonstrate(rng: random.Random, shares: Mapping[str, float]) -> Demonstration:
    problem = random_problem(rng, heldout=False)
    slips = frozenset(name for name in possible(problem) if rng.random() < shares.get(name, 0.0))
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.story}]
    result = ""
    for place, expression in enumerate(expressions(problem, slips)):
        result = calculator(expression)
        function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"call_{place}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "content": result})
    messages.append({"role": "assistant", "content": _answer(problem, slips, result)})
    return Demonstration(problem=problem, messages=tuple(messages), slips=slips)


def possible(problem: Problem) -> list[str]:
    """The slips that it tempts to."""
    operations = [step.operation for step in problem.steps]
    sums = [place for place, operation in enumerate(operations) if operation in "+-"]
    tempts = {
        "brackets": bool(sums) and any(operation in "*/" for operation in operations[sums[0] :]),
        "aside": problem.aside is not None,
        "short": len(problem.steps) > 1,
    }
    return [name for name in SLIPS if tempts.get(name, True)]


def expressions(problem: Problem, slips: frozenset[str] = frozenset()) -> list[str]:
    """What he has worked out, one after the other: a step each, which begins with the result of the one before."""
    worked, value = list[str](), str(problem.start)
    for step in _steps(problem, slips):
        worked.append(f"{value} {step.operation} {step.number}")
        value = worked[-1] if "brackets" in slips else calculator(worked[-1])
    worked = worked[-1:] if "brackets" in slips else worked
    return [*worked, *worked[-1:] * (TOOL_ITERATIONS - len(worked))] if "again" in slips else worked


def _steps(problem: Problem, slips: frozenset[str]) -> Sequence[Step]:
    steps = list(problem.steps)
    if "aside" in slips and problem.aside is not None:
        steps.insert(
            problem.aside_after,
            Step(kind="gain" if problem.aside.endswith("+") else "lose", number=problem.aside_number),
        )
    return steps[:-1] if "short" in slips else steps


def _answer(problem: Problem, slips: frozenset[str], result: str) -> str:
    return str(problem.start) if "start" in slips else result
