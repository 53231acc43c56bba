"""LangChain and LangGraph play recorded tool results back: the next request is the same, and no tool runs twice."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command

from lightningrl.runner.tool_playback import ToolWithheld
from tests.recipes.conftest import Scripted
from tests.trunks import Answer, playing, recorded, wish

PAID = '{"name": "ann", "amount": 5}'


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class Ledger:
    """What tools have really done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._lock = threading.Lock()

    def write(self, what: str) -> None:
        with self._lock:
            self.done.append(what)

    def tools(self) -> list[Any]:
        @tool
        def pay(name: str, amount: int) -> dict[str, Any]:
            """Pay somebody."""
            self.write(f"pay {name} {amount}")
            return {"paid": amount, "to": name, "receipt": len(self.done)}

        @tool
        async def mail(name: str) -> str:
            """Write a mail."""
            await asyncio.sleep(0)
            self.write(f"mail {name}")
            return f"mail {len(self.done)} to {name} — sent\n"

        @tool
        def fail(name: str) -> str:
            """Fail."""
            self.write(f"fail {name}")
            raise ToolException(f"nobody is called {name}")

        return [pay, mail, fail]


def agent(tools: list[Any]) -> Any:
    llm = ChatOpenAI(model="m").bind_tools(tools)

    async def think(state: State) -> State:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "think")
    return graph.compile()


async def run(server: Scripted, tools: list[Any], answers: list[Answer]) -> list[dict[str, Any]]:
    """The requests of one run."""
    server.answers, server.asked = list(answers), []
    await agent(tools).ainvoke({"messages": [HumanMessage("pay ann")]})
    return server.asked


def called(*calls: dict[str, Any]) -> Answer:
    return {"content": None, "tool_calls": list(calls)}


SCRIPT: list[Answer] = [
    called(wish("pay", PAID, id="call_a"), wish("mail", '{"name": "ann"}', id="call_b")),
    called(wish("fail", '{"name": "bob"}', id="call_c"), wish("pay", '{"name": "eve"}', id="call_d")),
    "done",
]
"""Two tools in parallel, one of them async; a tool that fails, and arguments that do not fit."""


@pytest.mark.parametrize("mode", ["safe", "never"])
async def test_a_graph_makes_the_same_requests_and_its_tools_run_once(server: Scripted, mode: Any) -> None:
    ledger = Ledger()
    asked = await run(server, ledger.tools(), SCRIPT)
    assert len(ledger.done) == 3
    with playing(recorded(asked, SCRIPT), tools=mode) as playback:
        again = await run(server, ledger.tools(), SCRIPT)
    assert json.dumps(again) == json.dumps(asked)
    assert len(ledger.done) == 3 and playback.why_void(succeeded=True) is None


async def test_what_follows_a_fresh_answer_runs(server: Scripted) -> None:
    ledger = Ledger()
    trunk = recorded(await run(server, ledger.tools(), SCRIPT), SCRIPT)
    fresh = [SCRIPT[0], called(wish("pay", PAID, id="call_new")), "done"]
    with playing(trunk, tools="never", call_id="c1"):
        await run(server, ledger.tools(), fresh)
    assert len(ledger.done) == 4 and ledger.done[-1] == "pay ann 5"


async def test_without_a_branch_the_patched_tools_run_as_ever(server: Scripted) -> None:
    ledger = Ledger()
    with playing([]):
        pass
    await run(server, ledger.tools(), SCRIPT)
    assert len(ledger.done) == 3
    assert ledger.tools()[0].invoke({"name": "ann", "amount": 1})["paid"] == 1


def artifact(done: list[str]) -> Any:
    @tool(response_format="content_and_artifact")
    def look(name: str) -> tuple[str, dict[str, str]]:
        """Look."""
        done.append(name)
        return "seen", {"name": name}

    return look


def command(done: list[str]) -> Any:
    @tool
    def look(name: str) -> Command[Any]:
        """Look."""
        done.append(name)
        return Command(update={})

    return look


@pytest.mark.parametrize(("make", "why"), [(artifact, "artifact"), (command, "Command")])
def test_a_tool_whose_result_is_more_than_text_runs_again_or_is_withheld(
    make: Callable[[list[str]], Any], why: str
) -> None:
    done: list[str] = []
    look, wished = make(done), {"type": "tool_call", "id": "call_a", "name": "look", "args": {"name": "ann"}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "look"}]}
    calls = [wish("look", '{"name": "ann"}', id="call_a")]
    result = {"role": "tool", "tool_call_id": "call_a", "content": "seen"}
    after = {**asked, "messages": [*asked["messages"], {"role": "assistant", "tool_calls": calls}, result]}
    trunk = recorded([asked, after], [called(*calls), "done"])
    with playing(trunk):
        look.invoke(wished)
    assert done == ["ann"]
    with playing(trunk, tools="never") as playback, pytest.raises(ToolWithheld, match=why):
        look.invoke(wished)
    assert done == ["ann"] and why in (playback.why_void(succeeded=False) or "")
