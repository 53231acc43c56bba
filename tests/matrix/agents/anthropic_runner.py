"""Anthropic's tool runner: the SDK runs the loop and the tools."""

import asyncio
import sys

import anthropic
from anthropic import beta_async_tool
from weather import QUESTION, answer, forecast


@beta_async_tool(name="forecast", description="Forecast the weather.")
async def tool(city: str, days: int, metric: bool, note: str | None) -> str:
    return forecast(city, days, metric, note)


async def main():
    stream = "stream" in sys.argv
    asked = [{"role": "user", "content": QUESTION}]
    async with anthropic.AsyncAnthropic() as client:
        runner = client.beta.messages.tool_runner(
            model="claude-sonnet-4-5", max_tokens=1000, tools=[tool], messages=asked, stream=stream
        )
        async for turn in runner:
            last = await turn.get_final_message() if stream else turn
    answer("".join(block.text for block in last.content if block.type == "text"))


asyncio.run(main())
