"""A hand-written LangGraph graph: a node for the model, a ToolNode, a conditional edge."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from weather import QUESTION, answer, forecast

tools = [tool(forecast)]
model = ChatOpenAI(model="gpt-5", temperature=1, streaming="stream" in sys.argv).bind_tools(tools)


def think(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode(tools))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
state = graph.compile().invoke({"messages": [("system", "You know the weather."), ("user", QUESTION)]})
answer(state["messages"][-1].text)
