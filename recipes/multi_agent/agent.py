"""A team of three that answers riddles about numbers: one plans, one does the sums, one looks at both and sends back
what is wrong.

An ordinary LangGraph program. It talks to whatever `OPENAI_BASE_URL` and `OPENAI_API_KEY` point at.

    plan → solve → check ─ good → END
     ↑       ↑      ├ sums ┐
     │       └──────┼──────┘
     └──────────────┴ plan

Settings come from the environment. TEAM_PLANNER_MODEL, TEAM_SOLVER_MODEL and TEAM_CRITIC_MODEL name the models;
TEAM_PLANNER_SYSTEM and so on are what they are told to do. TEAM_LOOKS is how often the critic may look (0: never),
TEAM_MAX_TOKENS limits an answer.
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
    """The planner's conversation; it goes on when the plan comes back."""
    solving: list[AnyMessage]
    """The solver's, about the plan as it is."""
    plan: str
    sums: str
    looks: int
    verdict: str


def plan(state: State) -> dict[str, Any]:
    asked = state.get("planning") or [told("planner", "plan")]
    asked = [*asked, HumanMessage(AGAIN if state.get("planning") else state["riddle"])]
    answer = ask("planner", asked)
    return {"planning": [*asked, answer], "plan": answer.text.strip(), "solving": []}


def solve(state: State) -> dict[str, Any]:
    asked = (
        [*state["solving"], HumanMessage(AGAIN)]
        if state["solving"]
        else [told("solver", "solve"), HumanMessage(state["plan"])]
    )
    answer = ask("solver", asked)
    return {"solving": [*asked, answer], "sums": answer.text.strip()}


def check(state: State) -> dict[str, Any]:
    work = f"{state['riddle']}\nplan {state['plan']}\nsums {state['sums']}"
    answer = ask("critic", [told("critic", "check"), HumanMessage(work)])
    return {"verdict": answer.text.strip(), "looks": state["looks"] + 1}


def after_solve(state: State) -> str:
    return "check" if state["looks"] < int(os.environ.get("TEAM_LOOKS", LOOKS)) else END


def after_check(state: State) -> str:
    return {"plan": "plan", "sums": "solve"}.get(state["verdict"], END)


def told(role: str, word: str) -> SystemMessage:
    return SystemMessage(os.environ.get(f"TEAM_{role.upper()}_SYSTEM", word))


def ask(role: str, messages: list[AnyMessage]) -> Any:
    name = os.environ.get(f"TEAM_{role.upper()}_MODEL", role)
    tokens = int(os.environ.get("TEAM_MAX_TOKENS", MAX_TOKENS))
    return client(name, tokens, os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY")).invoke(messages)


@cache
def client(name: str, tokens: int, _url: str | None, _key: str | None) -> ChatOpenAI:
    """A client costs milliseconds to make: one per model, server and key."""
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
    """The last number of the sums, and how it came about."""
    state = graph().invoke({"riddle": task["riddle"], "looks": 0})
    return {
        "answer": (state["sums"].split() or [""])[-1],
        "plan": state["plan"],
        "sums": state["sums"],
        "looks": state["looks"],
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
