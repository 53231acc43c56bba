"""AutoGen: an assistant that reflects on the tool's result; two questions."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from weather import AGAIN, QUESTION, answer, forecast


async def main():
    model = OpenAIChatCompletionClient(model="gpt-4o")
    agent = AssistantAgent(
        "forecaster",
        model_client=model,
        tools=[forecast],
        system_message="You know the weather.",
        reflect_on_tool_use="loop" not in sys.argv,
        max_tool_iterations=3 if "loop" in sys.argv else 1,
        model_client_stream="stream" in sys.argv,
    )
    for question in (QUESTION, AGAIN):
        result = await agent.run(task=TextMessage(content=question, source="user"))
        answer(result.messages[-1].content)
    await model.close()


asyncio.run(main())
