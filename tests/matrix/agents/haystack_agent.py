"""Haystack's agent component."""

import sys

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from weather import QUESTION, answer, forecast

callback = (lambda chunk: None) if "stream" in sys.argv else None
generator = OpenAIChatGenerator(model="gpt-4o", streaming_callback=callback)
agent = Agent(
    chat_generator=generator, tools=[create_tool_from_function(forecast)], system_prompt="You know the weather."
)
result = agent.run(messages=[ChatMessage.from_user(QUESTION)])
answer(result["messages"][-1].text)
