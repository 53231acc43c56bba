"""OpenAI Agents: one agent hands over to another, which calls its tool twice in parallel.

Over responses, or with `chat` over chat completions.
"""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api
from weather import AGAIN, QUESTION, answer, forecast

if "chat" in sys.argv:
    set_default_openai_api("chat_completions")

forecaster = Agent(
    name="Forecaster", model="gpt-5", instructions="You know the weather.", tools=[function_tool(forecast)]
)
triage = Agent(name="Triage", model="gpt-5", instructions="You know who knows.", handoffs=[forecaster])


async def ask(agent, question):
    if "stream" in sys.argv:
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question)
    answer(result.final_output)
    return result


async def main():
    result = await ask(triage if "handoff" in sys.argv else forecaster, QUESTION)
    await ask(result.last_agent, [*result.to_input_list(), {"role": "user", "content": AGAIN}])


asyncio.run(main())
