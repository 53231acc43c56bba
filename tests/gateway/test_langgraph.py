"""Is an unmodified LangGraph agent captured token by token?"""

import sqlite3
from typing import Annotated, Any, TypedDict

import httpx2
import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition

from .conftest import Stage


@tool
def execute(sql: str) -> str:
    """Run SQL."""
    try:
        return str(sqlite3.connect(":memory:").execute(sql).fetchall())
    except sqlite3.Error as error:
        return f"error: {error}"


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def agent(llm: Any) -> Any:
    """write ⇄ execute, until the model answers without a tool."""

    async def write(state: State) -> State:
        return {"messages": [await llm.bind_tools([execute]).ainvoke(state["messages"])]}

    graph = StateGraph(State)
    graph.add_node("write", write)
    graph.add_node("tools", ToolNode([execute]))
    graph.add_edge(START, "write")
    graph.add_conditional_edges("write", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "write")
    return graph.compile()


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_graph_with_a_tool_is_captured_as_one_growing_conversation(
    stage: Stage, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await stage.begin()
    monkeypatch.setenv("OPENAI_BASE_URL", f"{stage.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", attempt.token)
    stage.says(
        '<tool_call>\n{"name": "execute", "arguments": {"sql":"SELEC 1"}}\n</tool_call>',
        'again\n<tool_call>\n{"name": "execute", "arguments": {"sql": "SELECT 41 + 1"}}\n</tool_call>',
        "it is 42",
    )
    async with httpx2.AsyncClient() as http:  # all tests would share langchain's own client, which is never closed
        llm = ChatOpenAI(
            model="writer",
            temperature=1.0,
            streaming=streaming,
            max_retries=0,
            stream_usage=True,
            http_async_client=http,
        )
        state = await agent(llm).ainvoke({"messages": [HumanMessage("what is 41 + 1 ?")]})
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert "error" in state["messages"][2].content
    assert state["messages"][4].content == "[(42,)]"
    assert state["messages"][5].content == "it is 42"
    assert state["messages"][5].usage_metadata["output_tokens"] > 0
    one, two, three = await stage.calls(attempt)
    assert [(call.capture, call.parent_call_id) for call in (one, two, three)] == [
        ("rendered", None),
        ("bridged", one.id),
        ("bridged", two.id),
    ]
    for parent, call in ((one, two), (two, three)):
        exact = [*parent.prompt_ids, *parent.completion_ids]
        assert call.prompt_ids[: len(exact)].tolist() == exact
    assert [list(asked) for asked, _, _ in stage.engine.asked] == [
        call.prompt_ids.tolist() for call in (one, two, three)
    ]
    assert "error" in stage.template.decode(two.prompt_ids.tolist())
