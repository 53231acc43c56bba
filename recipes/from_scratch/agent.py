"""Answers questions about people by looking up facts: a loop over tool calls on OpenAI's own client."""

import json
from functools import cache
from typing import Any

from openai import AsyncOpenAI

SYSTEM = "Look up one fact at a time. Answer in one word."
FACT = {"type": "string", "description": "such as: boss of ann"}
ARGUMENTS = {"type": "object", "properties": {"fact": FACT}, "required": ["fact"]}
LOOK_UP = {"name": "look_up", "description": "Look up a fact.", "parameters": ARGUMENTS}
TOOLS: Any = [{"type": "function", "function": LOOK_UP}]
client = cache(AsyncOpenAI)  # made by the first task, then shared


async def run(task: dict[str, Any]) -> str | None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    for _ in range(4):
        completion = await client().chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer: Any = completion.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            fact = json.loads(call.function.arguments).get("fact")
            result = task["facts"].get(str(fact), "no such fact")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def reward(task: dict[str, Any], answer: str | None) -> float:
    return float(answer == task["answer"])
