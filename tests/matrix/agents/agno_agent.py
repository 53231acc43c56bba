"""Agno's agent over chat completions, or with `responses` over responses."""

import sys

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses
from weather import QUESTION, answer, forecast

model = OpenAIResponses(id="gpt-5") if "responses" in sys.argv else OpenAIChat(id="gpt-4o")
agent = Agent(model=model, tools=[forecast], instructions="You know the weather.", telemetry=False)
if "stream" in sys.argv:
    for event in agent.run(QUESTION, stream=True, stream_events=True):
        last = event
    answer(last.content)
else:
    answer(agent.run(QUESTION).content)
