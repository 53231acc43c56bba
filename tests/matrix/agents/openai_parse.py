"""OpenAI's SDK with strict tools and a structured answer: `parse` and `stream` read them into pydantic models."""

import asyncio
import sys

import openai
from openai import AsyncOpenAI
from pydantic import BaseModel
from weather import QUESTION, answer, forecast


class Forecast(BaseModel):
    city: str
    days: int
    metric: bool
    note: str | None


class Report(BaseModel):
    codes: list[str]
    sure: bool
    doubt: str | None


TOOLS = [openai.pydantic_function_tool(Forecast, name="forecast")]


async def ask(client, messages):
    if "stream" not in sys.argv:
        return await client.chat.completions.parse(
            model="gpt-5", messages=messages, tools=TOOLS, response_format=Report
        )
    async with client.chat.completions.stream(
        model="gpt-5", messages=messages, tools=TOOLS, response_format=Report
    ) as stream:
        return await stream.get_final_completion()


async def main():
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncOpenAI() as client:
        message = (await ask(client, messages)).choices[0].message
        (call,) = message.tool_calls
        result = forecast(**call.function.parsed_arguments.model_dump())
        messages += [
            message.model_dump(exclude={"parsed"}, exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        report = (await ask(client, messages)).choices[0].message.parsed
    assert report.sure and report.doubt is None
    answer(report.codes[0])


asyncio.run(main())
