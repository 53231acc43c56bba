"""Pydantic AI: a tool and a structured answer, over any of its providers."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from weather import QUESTION, answer, forecast

MODELS = {
    "chat": "openai-chat:gpt-5",
    "responses": "openai-responses:gpt-5",
    "anthropic": "anthropic:claude-sonnet-4-5",
    "google": "google:gemini-2.5-flash",
}


class Report(BaseModel):
    codes: list[str]
    sure: bool
    doubt: str | None


agent = Agent(MODELS[sys.argv[1]], output_type=Report, instructions="You know the weather.", tools=[forecast])


async def main():
    if "stream" in sys.argv:
        async with agent.run_stream(QUESTION) as result:
            report = await result.get_output()
    else:
        report = (await agent.run(QUESTION)).output
    assert report.sure and report.doubt is None
    answer(report.codes[0])


asyncio.run(main())
