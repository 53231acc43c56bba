"""LangGraph's prebuilt agent over ChatOpenAI, with a memory; with `responses` over responses."""

import asyncio
import sys
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from weather import AGAIN, QUESTION, answer, forecast

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it has moved to a package that is not needed here
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="gpt-5", use_responses_api="responses" in sys.argv)
    agent = create_react_agent(model, [tool(forecast)], prompt="You know the weather.", checkpointer=InMemorySaver())


async def ask(question):
    settings = {"configurable": {"thread_id": "one"}}
    asked = {"messages": [{"role": "user", "content": question}]}
    if "stream" in sys.argv:
        async for _ in agent.astream(asked, settings, stream_mode="messages"):
            pass
        state = (await agent.aget_state(settings)).values
    else:
        state = await agent.ainvoke(asked, settings)
    answer(state["messages"][-1].text)


async def main():
    await ask(QUESTION)
    await ask(AGAIN)


asyncio.run(main())
