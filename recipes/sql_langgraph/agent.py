"""A LangGraph agent that answers questions about a database: it writes a query, runs it, and rewrites it if need be.

    write_query → execute_query → check_query ─ good → END
                       ↑               └─ bad → rewrite_query ┐
                       └──────────────────────────────────────┘

It talks to the server that `OPENAI_BASE_URL` and `OPENAI_API_KEY` name. More settings from the environment:

    SQL_WRITER_MODEL, SQL_REWRITER_MODEL, SQL_CHECKER_MODEL     names of the models
    SQL_CHECKER                                                 `rule` (an error or an empty result is bad), or `model`
    SQL_MAX_TURNS                                               queries at most; 1 never rewrites
    SQL_MAX_TOKENS                                              tokens of an answer at most
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, TypedDict

from database import Database, open_database
from feedback import Feedback, execute
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

SYSTEM = "write sqlite"
MAX_TURNS = 3
MAX_TOKENS = 64


class State(TypedDict):
    task: Mapping[str, Any]
    database: Database
    messages: list[AnyMessage]
    queries: list[str]
    feedback: Feedback
    good: bool


def write_query(state: State) -> dict[str, Any]:
    task = state["task"]
    messages: list[AnyMessage] = [SystemMessage(SYSTEM), HumanMessage(f"{task['schema']}\n{task['question']}")]
    answer = ask("writer", messages)
    return {"messages": [*messages, answer], "queries": [answer.text.strip()]}


def execute_query(state: State) -> dict[str, Any]:
    return {"feedback": execute(state["database"], state["queries"][-1])}


def check_query(state: State) -> dict[str, Any]:
    if os.environ.get("SQL_CHECKER", "rule") == "rule":
        return {"good": state["feedback"].good}
    answer = ask("checker", [*state["messages"], HumanMessage(f"{state['feedback'].text}\nis this right ? yes or no")])
    return {"good": answer.text.strip().lower().startswith("yes")}


def after_check(state: State) -> str:
    turns = int(os.environ.get("SQL_MAX_TURNS", MAX_TURNS))
    return END if state["good"] or len(state["queries"]) >= turns else "rewrite_query"


def rewrite_query(state: State) -> dict[str, Any]:
    messages = [*state["messages"], HumanMessage(state["feedback"].text)]
    answer = ask("rewriter", messages)
    return {"messages": [*messages, answer], "queries": [*state["queries"], answer.text.strip()]}


def ask(role: str, messages: list[AnyMessage]) -> AIMessage:
    name = os.environ.get(f"SQL_{role.upper()}_MODEL", f"sql-{role}")
    tokens = int(os.environ.get("SQL_MAX_TOKENS", MAX_TOKENS))
    return client(name, tokens, os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")).invoke(messages)


@cache
def client(name: str, tokens: int, _url: str | None, _key: str | None) -> ChatOpenAI:
    """One client per model, server and key: making one takes milliseconds."""
    return ChatOpenAI(model=name, max_completion_tokens=tokens, timeout=60)


@cache
def graph() -> Any:
    builder = StateGraph(State)
    builder.add_node(write_query)
    builder.add_node(execute_query)
    builder.add_node(check_query)
    builder.add_node(rewrite_query)
    builder.add_edge(START, "write_query")
    builder.add_edge("write_query", "execute_query")
    builder.add_edge("execute_query", "check_query")
    builder.add_conditional_edges("check_query", after_check, ["rewrite_query", END])
    builder.add_edge("rewrite_query", "execute_query")
    return builder.compile()


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """The last query, and all of them."""
    database = open_database(task)
    try:
        state = graph().invoke({"task": task, "database": database})
    finally:
        database.close()
    return {"sql": state["queries"][-1], "queries": state["queries"]}


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
