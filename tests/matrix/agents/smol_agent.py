"""smolagents: an agent that calls tools, and one that writes code."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from weather import QUESTION, answer, forecast

model = OpenAIServerModel(
    model_id="gpt-4o", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
kind = CodeAgent if "code" in sys.argv else ToolCallingAgent
agent = kind(tools=[tool(forecast)], model=model, max_steps=4, verbosity_level=0, stream_outputs="stream" in sys.argv)
answer(agent.run(QUESTION))
