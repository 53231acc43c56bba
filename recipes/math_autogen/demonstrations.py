"""Demonstrations for the warm start: whole conversations of the agent with a demonstrator who is often wrong.

The demonstrator uses the agent's own calculator, one step at a time: `37 + 5`, then `42 * 12`. Each kind of slip occurs
in a fixed share of the problems where it is possible.
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
"""Share of problems with each slip, of those where it is possible. `brackets`: writes one expression without brackets,
as if `37 + 5 * 12` were evaluated from the left. `aside`: counts the irrelevant sentence. `short`: omits the last step.
`start`: answers with the first number. `again`: repeats the last calculation until the tools are gone, which does no
harm. Above one half a slip is a habit, so greedy decoding has it, too. No slip is the opposite of another.
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
"""The server's tool as AutoGen describes it to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    problem: Problem
    messages: tuple[dict[str, Any], ...]
    """The conversation as the agent holds it: system, user, then assistant and tool in turn."""
    slips: frozenset[str]
    """The slips that were made."""

    @property
    def reflects(self) -> bool:
        """Whether the last answer is given without tools, because all rounds of tool calls are used up."""
        return sum(message["role"] == "tool" for message in self.messages) == TOOL_ITERATIONS

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Conversations on problems of the split `train`, none of them from `tasks`. `perfect`: without slips."""
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
    """The slips that are possible in a problem."""
    operations = [step.operation for step in problem.steps]
    sums = [place for place, operation in enumerate(operations) if operation in "+-"]
    tempts = {
        "brackets": bool(sums) and any(operation in "*/" for operation in operations[sums[0] :]),
        "aside": problem.aside is not None,
        "short": len(problem.steps) > 1,
    }
    return [name for name in SLIPS if tempts.get(name, True)]


def expressions(problem: Problem, slips: frozenset[str] = frozenset()) -> list[str]:
    """The expressions that the demonstrator calculates: one per step, each starting with the previous result."""
    worked, value = list[str](), str(problem.start)
    for step in _steps(problem, slips):
        worked.append(f"{value} {step.operation} {step.number}")
        value = worked[-1] if "brackets" in slips else calculator(worked[-1])
    worked = worked[-1:] if "brackets" in slips else worked
    return [*worked, *worked[-1:] * (TOOL_ITERATIONS - len(worked))] if "again" in slips else worked


def _steps(problem: Problem, slips: frozenset[str]) -> Sequence[Step]:
    steps = list(problem.steps)
    if "aside" in slips and problem.aside is not None:
        kind = "gain" if problem.aside.endswith("+") else "lose"
        steps.insert(problem.aside_after, Step(kind=kind, number=problem.aside_number))
    return steps[:-1] if "short" in slips else steps


def _answer(problem: Problem, slips: frozenset[str], result: str) -> str:
    return str(problem.start) if "start" in slips else result
