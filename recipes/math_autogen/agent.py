"""An AutoGen agent that solves word problems with a calculator, which it reaches over MCP.

    AssistantAgent: model → calculator → model → … → answer

After MATH_TOOL_ITERATIONS rounds of tool calls the model reflects: it gives one more answer, without tools. The agent
talks to the server that `OPENAI_BASE_URL` and `OPENAI_API_KEY` name. MATH_MODEL names the model, MATH_MAX_TOKENS limits
an answer.
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
    """The agent's last message, and the expressions of its calls. Raises `CalculatorFailed` if the calculator broke."""
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
    results = [event.content for event in result.messages if isinstance(event, ToolCallExecutionEvent)]
    calculator.check([one for content in results for one in content])
    last = result.messages[-1]
    requests = [event.content for event in result.messages if isinstance(event, ToolCallRequestEvent)]
    calls = [call.arguments for content in requests for call in content]
    return {"answer": last.content if isinstance(last, TextMessage) else "", "calls": calls}


@cache
def client(name: str, _url: str | None, _key: str | None) -> OpenAIChatCompletionClient:
    """One client per model, server and key: making one takes milliseconds."""
    tokens = int(os.environ.get("MATH_MAX_TOKENS", MAX_TOKENS))
    return OpenAIChatCompletionClient(model=name, model_info=ANY_MODEL, max_tokens=tokens, timeout=60)


async def main() -> None:
    try:
        print(json.dumps(await run(json.load(sys.stdin))))
    finally:
        await close()


if __name__ == "__main__":
    asyncio.run(main())
