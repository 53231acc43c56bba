"""AutoGen: a team. With `selector` a model chooses the next speaker, otherwise they take turns."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient
from weather import QUESTION, answer, forecast


async def main():
    model = OpenAIChatCompletionClient(model="gpt-4o")
    stream = "stream" in sys.argv
    forecaster = AssistantAgent(
        "forecaster",
        model_client=model,
        tools=[forecast],
        description="Looks up the weather.",
        system_message="You are the forecaster.",
        max_tool_iterations=2,
        model_client_stream=stream,
    )
    editor = AssistantAgent(
        "editor",
        model_client=model,
        description="Prints.",
        system_message="You are the editor. Say DONE.",
        model_client_stream=stream,
    )
    ends = TextMentionTermination("DONE", sources=["editor"])
    if "selector" in sys.argv:
        team = SelectorGroupChat(
            [forecaster, editor], model_client=model, termination_condition=ends, model_client_streaming=stream
        )
    else:
        team = RoundRobinGroupChat([forecaster, editor], termination_condition=ends)
    async for event in team.run_stream(task=QUESTION):
        last = event
    answer(last.messages[-1].content)
    await model.close()


asyncio.run(main())
