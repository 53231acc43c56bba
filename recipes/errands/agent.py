"""An agent that runs errands in a house: it finds things and sends each to the person who asked for it.

A loop over tool calls with OpenAI's SDK. It talks to the server that `OPENAI_BASE_URL` and `OPENAI_API_KEY` name, until
the model answers without a tool call. ERRANDS_MAX_CALLS limits its calls, ERRANDS_MODEL names the model.
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from house import TOOLS, House
from openai import OpenAI

SYSTEM = "run errands"
MAX_CALLS = 12
"""Three errands take ten calls: go, take and send for each, and a final word."""
MAX_TOKENS = 24


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """The parcels that were sent."""
    house = House(task["rooms"], task["wanted"])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["request"]}]
    for _ in range(int(os.environ.get("ERRANDS_MAX_CALLS", MAX_CALLS))):
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": use(house, call["function"])})
    return {"sent": house.sent}


def use(house: House, wish: Mapping[str, str]) -> str:
    try:
        arguments = json.loads(wish["arguments"])
    except ValueError:
        return "error: arguments must be json"
    return house.call(wish["name"], arguments)


def ask(messages: list[Any]) -> dict[str, Any]:
    name = os.environ.get("ERRANDS_MODEL", "errands")
    reply = client(os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")).chat.completions.create(
        model=name, messages=messages, tools=TOOLS, max_completion_tokens=MAX_TOKENS
    )
    return reply.choices[0].message.model_dump(exclude_none=True)


@cache
def client(_url: str | None, _key: str | None) -> OpenAI:
    """One client per server and key: making one takes milliseconds."""
    return OpenAI(timeout=60)


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
