"""An agent that solves word problems with a calculator, which it reaches over MCP.

An ordinary AutoGen program. It talks to whatever `OPENAI_BASE_URL` and `OPENAI_API_KEY` point at.

    AssistantAgent: ask → calculator → ask → … → an answer
                        at most MATH_TOOL_ITERATIONS rounds; then it reflects on what it has: one more answer, without
                        tools

Settings come from the environment. MATH_MODEL names the model, MATH_MAX_TOKENS limits an answer, MATH_TOOL_ITERATIONS
the rounds of tool calls.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage, ToolCallExecutionEvent, ToolCallRequestEvent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from workbench import close, shared

SYSTEM = "Solve the problem with the calculator. End with the number."
TOOL_ITERATIONS = 4
MAX_TOKENS = 32
ANY_MODEL = ModelInfo(
    family=ModelFamily.UNKNOWN, function_calling=True, vision=False, json_output=False, structured_output=False
)


async def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent said in the end, and what it wanted worked out before. Raises `CalculatorFailed` if it was told
    what is nobody's answer.
    """
    calculator = await shared()
    agent = AssistantAgent(
        "math",
        client(
            os.environ.get("MATH_MODEL", "math"), os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")
        ),
        workbench=calculator,
        system_message=SYSTEM,
        reflect_on_tool_use=True,
        max_tool_iterations=int(os.environ.get("MATH_TOOL_ITERATIONS", TOOL_ITERATIONS)),
    )
    result = await agent.run(task=task["question"])
    calculator.check(
        [told for message in result.messages if isinstance(message, ToolCallExecutionEvent) for told in message.content]
    )
    last = result.messages[-1]
    calls = [
        call.arguments
        for message in result.messages
        if isinstance(message, ToolCallRequestEvent)
        for call in message.content
    ]
    return {"answer": last.content if isinstance(last, TextMessage) else "", "calls": calls}


@cache
def client(name: str, _url: str | None, _key: str | None) -> OpenAIChatCompletionClient:
    """A client costs milliseconds to make: one per model, server and key."""
    tokens = int(os.environ.get("MATH_MAX_TOKENS", MAX_TOKENS))
    return OpenAIChatCompletionClient(model=name, model_info=ANY_MODEL, max_tokens=tokens, timeout=60)


async def main() -> None:
    try:
        print(json.dumps(await run(json.load(sys.stdin))))
    finally:
        await close()


if __name__ == "__main__":
    asyncio.run(main())
