"""Strands' agent, which always streams, over OpenAI or Anthropic."""

import sys

from strands import Agent, tool
from weather import AGAIN, QUESTION, answer, forecast

if "anthropic" in sys.argv:
    from strands.models.anthropic import AnthropicModel

    model = AnthropicModel(model_id="claude-sonnet-4-5", max_tokens=1000)
else:
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(model_id="gpt-4o")

agent = Agent(model=model, tools=[tool(forecast)], system_prompt="You know the weather.", callback_handler=None)
for question in (QUESTION, AGAIN)[: 1 if "once" in sys.argv else 2]:
    said = agent(question).message
    answer("".join(block["text"] for block in said["content"] if "text" in block))
