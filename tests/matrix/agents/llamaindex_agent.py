"""LlamaIndex: a function agent."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai import OpenAI
from weather import AGAIN, QUESTION, answer, forecast

agent = FunctionAgent(
    tools=[forecast], llm=OpenAI(model="gpt-4o"), system_prompt="You know the weather.", streaming="stream" in sys.argv
)


async def main():
    memory = ChatMemoryBuffer.from_defaults(token_limit=100_000, tokenizer_fn=str.split)
    for question in (QUESTION, AGAIN):
        answer(str(await agent.run(question, memory=memory)))


asyncio.run(main())
