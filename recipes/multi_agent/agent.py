"""A LangGraph team of three that answers riddles about numbers: a planner, a solver, and a critic who sends work back.

    plan → solve → check ─ good → END
     ↑       ↑      ├ sums ┐
     │       └──────┼──────┘
     └──────────────┴ plan

It talks to the server that `OPENAI_BASE_URL` and `OPENAI_API_KEY` name. More settings from the environment:

    TEAM_PLANNER_MODEL, TEAM_SOLVER_MODEL, TEAM_CRITIC_MODEL        names of the models
    TEAM_PLANNER_SYSTEM, TEAM_SOLVER_SYSTEM, TEAM_CRITIC_SYSTEM     their system prompts
    TEAM_LOOKS                                                      checks by the critic at most; 0 for none
    TEAM_MAX_TOKENS                                                 tokens of an answer at most
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

LOOKS = 1
MAX_TOKENS = 12
AGAIN = "again"


class State(TypedDict):
    riddle: str
    planning: list[AnyMessage]
    """The planner's conversation; it continues when the plan comes back."""
    solving: list[AnyMessage]
    """The solver's conversation about the current plan."""
    plan: str
    sums: str
    looks: int
    verdict: str


def plan(state: State) -> dict[str, Any]:
    messages = state.get("planning") or [system("planner", "plan")]
    messages = [*messages, HumanMessage(AGAIN if state.get("planning") else state["riddle"])]
    answer = ask("planner", messages)
    return {"planning": [*messages, answer], "plan": answer.text.strip(), "solving": []}


def solve(state: State) -> dict[str, Any]:
    if state["solving"]:
        messages = [*state["solving"], HumanMessage(AGAIN)]
    else:
        messages = [system("solver", "solve"), HumanMessage(state["plan"])]
    answer = ask("solver", messages)
    return {"solving": [*messages, answer], "sums": answer.text.strip()}


def check(state: State) -> dict[str, Any]:
    work = f"{state['riddle']}\nplan {state['plan']}\nsums {state['sums']}"
    answer = ask("critic", [system("critic", "check"), HumanMessage(work)])
    return {"verdict": answer.text.strip(), "looks": state["looks"] + 1}


def after_solve(state: State) -> str:
    return "check" if state["looks"] < int(os.environ.get("TEAM_LOOKS", LOOKS)) else END


def after_check(state: State) -> str:
    return {"plan": "plan", "sums": "solve"}.get(state["verdict"], END)


def system(role: str, default: str) -> SystemMessage:
    return SystemMessage(os.environ.get(f"TEAM_{role.upper()}_SYSTEM", default))


def ask(role: str, messages: list[AnyMessage]) -> Any:
    name = os.environ.get(f"TEAM_{role.upper()}_MODEL", role)
    tokens = int(os.environ.get("TEAM_MAX_TOKENS", MAX_TOKENS))
    return client(name, tokens, os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")).invoke(messages)


@cache
def client(name: str, tokens: int, _url: str | None, _key: str | None) -> ChatOpenAI:
    """One client per model, server and key: making one takes milliseconds."""
    return ChatOpenAI(model=name, max_completion_tokens=tokens, timeout=60)


@cache
def graph() -> Any:
    builder = StateGraph(State)
    builder.add_node(plan)
    builder.add_node(solve)
    builder.add_node(check)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "solve")
    builder.add_conditional_edges("solve", after_solve, ["check", END])
    builder.add_conditional_edges("check", after_check, ["plan", "solve", END])
    return builder.compile()


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """The last number of the sums, and the work that led to it."""
    state = graph().invoke({"riddle": task["riddle"], "looks": 0})
    return {
        "answer": (state["sums"].split() or [""])[-1],
        "plan": state["plan"],
        "sums": state["sums"],
        "looks": state["looks"],
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
