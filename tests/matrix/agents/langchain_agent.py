"""LangChain's prebuilt agent, whose tool is called twice in parallel."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from weather import QUESTION, answer, forecast

agent = create_agent(ChatOpenAI(model="gpt-5"), [tool(forecast)], system_prompt="You know the weather.")
asked = {"messages": [{"role": "user", "content": QUESTION}]}
if "stream" in sys.argv:
    for _, state in agent.stream(asked, stream_mode=["messages", "values"]):
        last = state
else:
    last = agent.invoke(asked)
answer(last["messages"][-1].text)
