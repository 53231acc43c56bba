"""Branches whose tools must not run twice: agents in real workers, with a hand-written loop and one line of ours."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
import pytest

import lightningrl
from lightningrl.branches import VOID
from lightningrl.chat import ChatTemplate
from lightningrl.config import AgentConfig
from lightningrl.gateway import create_app
from lightningrl.leases import StoreLeases
from lightningrl.runner import Outcome
from lightningrl.runner.attach import Identity, gateway_of
from lightningrl.runner.environment import addresses
from lightningrl.runner.pool import WorkerPool
from lightningrl.runner.relay import Relay
from lightningrl.runner.replayed import fetch
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.tracing.tool_results import tool_results
from lightningrl.types import Attempt, Branch, Rollout, Task

from .conftest import ScriptedEngine, Stage, serving

Mode: TypeAlias = Literal["rerun", "safe", "never"]
Opened: TypeAlias = Callable[[Mode], AbstractAsyncContextManager[Stage]]

AGENT = '''
import asyncio, json, pathlib, sys, threading
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI
import lightningrl

PAY = {"name": "pay", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}}

def pay(ledger, to):
    """The side effect: the world outside of the agent."""
    with open(ledger, "a") as file:
        file.write(to + "\\n")
    return f"paid {to}"

def result(ledger, call):
    text = lightningrl.replayed(call.id)
    return pay(ledger, **json.loads(call.function.arguments)) if text is None else text

def run(task):
    client, pool = OpenAI(max_retries=0), ThreadPoolExecutor(4)
    messages = [{"role": "user", "content": "say a word"}]
    while True:
        tools = [{"type": "function", "function": PAY}]
        message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        done = pool.map(lambda call: result(task["ledger"], call), message.tool_calls)  # in parallel, in threads
        for call, text in zip(message.tool_calls, done):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

def graph(task):
    """LangGraph, whose tools know nothing of branches. It is imported after the first attempt has begun."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    def paying(to: str) -> str:
        """Pay somebody."""
        return pay(task["ledger"], to)

    tools = [tool("pay")(paying)]
    model = ChatOpenAI(model="m", max_retries=0).bind_tools(tools)
    builder = StateGraph(MessagesState)
    builder.add_node("think", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "think")
    builder.add_conditional_edges("think", tools_condition)
    builder.add_edge("tools", "think")
    return builder.compile().invoke({"messages": [("user", "say a word")]})["messages"][-1].content

async def swallows(task):
    """It keeps on asking, whatever happens to its tool."""
    try:
        return await asyncio.to_thread(run, task)
    except BaseException:
        await asyncio.sleep(30)

def careless(task):
    """It does not ask for recorded results."""
    lightningrl.replayed = lambda tool_call_id: None
    return run(task)

def once(task):
    """It ends right after its first tool, so that no request has the result."""
    client = OpenAI(max_retries=0)
    tools = [{"type": "function", "function": PAY}]
    messages = [{"role": "user", "content": "say a word"}]
    message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
    return [result(task["ledger"], call) for call in message.tool_calls]

if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
'''


def paying(*names: str) -> str:
    calls = (json.dumps({"name": "pay", "arguments": {"to": name}}) for name in names)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.fixture
def opened(template: ChatTemplate) -> Opened:
    @asynccontextmanager
    async def stage(mode: Mode) -> AsyncIterator[Stage]:
        store, engine = await SQLiteStore.open(":memory:"), ScriptedEngine(lambda prompt_ids, sampling: ())
        gateway = create_app(store=store, chat=template, engines={"policy": engine}, max_length=4000, replay_tools=mode)
        async with serving(gateway) as url:
            yield Stage(store=store, template=template, engine=engine, gateway=gateway, url=url)
        await store.close()

    return stage


@asynccontextmanager
async def pool(stage: Stage, root: Path, entry: str, *, program: bool = False) -> AsyncIterator[WorkerPool]:
    (root / "agent.py").write_text(AGENT)
    how: dict[str, Any] = {"command": [sys.executable, str(root / "agent.py")]} if program else {"entry": entry}
    agent = AgentConfig(**how, reward="agent:run", grade="server", workers=1)
    made = WorkerPool(agent, root=root, env={"OPENAI_BASE_URL": f"{stage.url}/v1"}, log_path=root / "agent.log")
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def attempt(
    stage: Stage, workers: WorkerPool, ledger: Path, name: str, branch: Branch | None = None
) -> tuple[Attempt, Outcome]:
    """Run one rollout as the dispatcher would."""
    task = Task(id="t", input={"ledger": str(ledger)}, split="train")
    rollout = Rollout(id=name, group_id="g", task=task, timeout_s=20.0, branch=branch)
    await stage.store.enqueue([rollout])
    leases = StoreLeases(stage.store).of(name)
    [(rollout, claimed)] = await leases.claim(limit=1, holding=())
    outcome = await workers.run(rollout, claimed, addresses(stage.url, key=claimed.token))
    await leases.finish(claimed.id, outcome)
    [ended] = await stage.store.attempts([name])
    return ended, outcome


def paid(ledger: Path) -> list[str]:
    return sorted(ledger.read_text().split()) if ledger.exists() else []


async def at(stage: Stage, trunk: Attempt, place: int) -> Branch:
    return Branch(attempt_id=trunk.id, call_id=(await stage.calls(trunk))[place].id)


TRUNK = (paying("ann", "bob"), paying("eve"), "done")
"""Two payments in parallel, another one, and the end."""


@pytest.mark.parametrize(
    ("mode", "name"),
    [("rerun", "run"), ("safe", "run"), ("never", "run"), ("safe", "program"), ("rerun", "graph"), ("never", "graph")],
)
async def test_a_tool_of_the_trunk_runs_once_and_a_new_one_runs(
    opened: Opened, tmp_path: Path, mode: Mode, name: str
) -> None:
    ledger = tmp_path / "ledger"
    async with opened(mode) as stage, pool(stage, tmp_path, f"agent:{name}", program=name == "program") as workers:
        stage.says(*TRUNK)
        trunk, _ = await attempt(stage, workers, ledger, "r")
        assert paid(ledger) == ["ann", "bob", "eve"]
        stage.says(paying("zoe"), "done")
        branch, _ = await attempt(stage, workers, ledger, "r-at02-1", await at(stage, trunk, 1))
        again = ["ann", "bob"] if mode == "rerun" else []
        assert (branch.status, branch.error) == ("succeeded", None)
        assert paid(ledger) == sorted(["ann", "bob", "eve", "zoe", *again])
        calls = await stage.calls(branch)
        assert calls[1].prompt_ids.tolist() == (await stage.calls(trunk))[1].prompt_ids.tolist()


async def test_branches_of_one_worker_play_their_own_trunks_back(opened: Opened, tmp_path: Path) -> None:
    ledgers = [tmp_path / f"ledger-{n}" for n in range(4)]
    async with opened("never") as stage, pool(stage, tmp_path, "agent:run") as workers:
        trunks: list[Attempt] = []
        for n, ledger in enumerate(ledgers):
            stage.says(paying(f"name-{n}"), "done")
            trunks.append((await attempt(stage, workers, ledger, f"r{n}"))[0])
        stage.says("done")
        found = [
            attempt(stage, workers, ledgers[n], f"r{n}-all", Branch(attempt_id=trunk.id, call_id=None))
            for n, trunk in enumerate(trunks)
        ]
        ended = [await one for one in found[:2]] + list(await asyncio.gather(*found[2:]))
        plain, _ = await attempt(stage, workers, ledgers[0], "plain")
    assert [branch.status for branch, _ in ended] == ["succeeded"] * 4
    assert [paid(ledger) for ledger in ledgers] == [[f"name-{n}"] for n in range(4)]
    assert plain.status == "succeeded"


@pytest.mark.parametrize("entry", ["agent:once", "agent:swallows"])
async def test_a_tool_that_cannot_be_played_back_is_withheld_and_the_attempt_is_void(
    opened: Opened, tmp_path: Path, entry: str
) -> None:
    """No request of the trunk has its last result."""
    ledger = tmp_path / "ledger"
    async with opened("never") as stage, pool(stage, tmp_path, "agent:once") as first:
        stage.says(paying("ann"))
        trunk, _ = await attempt(stage, first, ledger, "r")
        async with pool(stage, tmp_path, entry) as workers:
            branch, outcome = await attempt(stage, workers, ledger, "r-all", Branch(attempt_id=trunk.id, call_id=None))
    assert paid(ledger) == ["ann"]
    assert branch.status == "failed" and outcome.rewards == ()
    assert (branch.error or "").startswith(f"{VOID}tool `pay` must not run again, and its result cannot be played back")


async def test_it_runs_again_where_that_is_safe(opened: Opened, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with opened("safe") as stage, pool(stage, tmp_path, "agent:once") as workers:
        stage.says(paying("ann"))
        trunk, _ = await attempt(stage, workers, ledger, "r")
        await attempt(stage, workers, ledger, "r-all", Branch(attempt_id=trunk.id, call_id=None))
    assert paid(ledger) == ["ann", "ann"]


async def test_an_agent_that_asks_for_no_result_is_void_afterwards(opened: Opened, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with opened("never") as stage, pool(stage, tmp_path, "agent:careless") as workers:
        stage.says(*TRUNK)
        trunk, _ = await attempt(stage, workers, ledger, "r")
        branch, _ = await attempt(stage, workers, ledger, "r-all", Branch(attempt_id=trunk.id, call_id=None))
    assert branch.status == "failed" and "none of `3` recorded tool results was asked for" in (branch.error or "")


async def ask(stage: Stage, token: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stage.url) as http:
        return await http.get("/v1/replay/tools", headers={"authorization": f"Bearer {token}"})


async def test_a_token_opens_the_results_of_its_own_trunk(opened: Opened, tmp_path: Path) -> None:
    async with opened("safe") as stage, pool(stage, tmp_path, "agent:run") as workers:
        stage.says(*TRUNK)
        trunk, _ = await attempt(stage, workers, tmp_path / "ledger", "r")
        branched = Rollout(
            id="b", group_id="g", task=Task(id="t", input={}, split="train"), branch=await at(stage, trunk, 1)
        )
        await stage.store.enqueue([branched])
        [(_, running)] = await stage.store.claim("w", limit=1, lease_s=60)
        plain = await stage.begin("plain")
        body = (await ask(stage, running.token)).json()
        assert body["tools"] == "safe" and [one["text"] for one in body["results"]] == ["paid ann", "paid bob"]
        assert (await ask(stage, plain.token)).json() == {"tools": "rerun", "results": []}
        assert (await ask(stage, "lrl-nobody")).status_code == 401


async def test_workers_on_other_machines_get_them_through_their_relay(opened: Opened, tmp_path: Path) -> None:
    async with opened("never") as stage, pool(stage, tmp_path, "agent:run") as workers:
        stage.says(*TRUNK)
        trunk, _ = await attempt(stage, workers, tmp_path / "ledger", "r")
        task = Task(id="t", input={}, split="train")
        branch = Branch(attempt_id=trunk.id, call_id=None)
        await stage.store.enqueue([Rollout(id="b", group_id="g", task=task, branch=branch)])
        [(_, running)] = await stage.store.claim("w", limit=1, lease_s=60)
        calls = await stage.calls(trunk)
        async with Relay(stage.url) as relay:
            relay.begin(running.id, running.token)
            playback = await asyncio.to_thread(fetch, Identity(token=running.token, gateway=gateway_of(relay.url)))
            relay.end(running.id)
    [first, *_] = tool_results(calls, branch)
    assert playback.mode == "never" and playback.result(first.id) == first


def test_outside_of_an_attempt_nothing_is_played_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-person's-own")
    assert lightningrl.replayed("call_a") is None
