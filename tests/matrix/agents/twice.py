"""Runs an agent of a framework twice, the second time with the recorded results of its tools: `twice.py FRAMEWORK`.

A server in this process answers both runs from one script. The last line says what tools did, and what was asked.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from lightningrl.runner import tool_hooks
from lightningrl.runner.attach import Identity, identity
from lightningrl.runner.tool_playback import ToolPlayback, ToolWithheld
from lightningrl.tracing.tool_results import Recorded, ToolResult

DONE: list[str] = []
QUESTION = "pay ann"
EARLY = ("openai_agents", "pydantic_ai")
"""Patched when the agent imports them; the others were imported before."""


def pay(name: str, amount: int) -> str:
    """Pay somebody."""
    DONE.append(f"pay {name} {amount}")
    return f"receipt {len(DONE)} — {name}\n"


async def mail(name: str) -> dict[str, int]:
    """Write a mail."""
    DONE.append(f"mail {name}")
    return {"mails": len(DONE), "€": 5}


def fail(name: str) -> str:
    """Fail."""
    DONE.append(f"fail {name}")
    raise ValueError(f"nobody is called {name}")


def call(name: str, arguments: str, id: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [
    [call("pay", '{"name": "ann", "amount": 5}', "call_a"), call("mail", '{"name":"ann"}', "call_b")],
    [call("pay", '{"name": "bob", "amount":  7}', "call_c")],
]
FAILING = [[call("fail", '{"name": "bob"}', "call_f")]]
NEW = [CALLS[0], [call("pay", '{"name": "bob", "amount":  7}', "call_new")]]


class Handler(BaseHTTPRequestHandler):
    script: ClassVar[list[list[dict[str, Any]]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        place = len(self.asked) - 1
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if place < len(self.script):
            message = {"role": "assistant", "content": None, "tool_calls": self.script[place]}
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "gpt-4o", "usage": usage}
        body = json.dumps({**reply, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def langchain() -> None:
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="gpt-4o"), [tool(pay), tool(mail)])
    await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})


async def openai_agents() -> None:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    tools = [function_tool(one) for one in (pay, mail, fail)]
    await Runner.run(Agent(name="a", model="gpt-4o", tools=tools), QUESTION)


async def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    model = OpenAIChatCompletionClient(model="gpt-4o")
    await AssistantAgent("a", model_client=model, tools=[pay, mail, fail], max_tool_iterations=5).run(task=QUESTION)
    await model.close()


async def autogen_core() -> None:
    """A loop of one's own over AutoGen's tools."""
    from autogen_core import CancellationToken
    from autogen_core.models import (
        AssistantMessage,
        FunctionExecutionResult,
        FunctionExecutionResultMessage,
        UserMessage,
    )
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    model = OpenAIChatCompletionClient(model="gpt-4o")
    tools = {one.__name__: FunctionTool(one, description="-") for one in (pay, mail)}
    messages: list[Any] = [UserMessage(content=QUESTION, source="user")]
    while True:
        said = (await model.create(messages, tools=list(tools.values()))).content
        if isinstance(said, str):
            break
        messages.append(AssistantMessage(content=said, source="a"))
        results = []
        for one in said:
            value = await tools[one.name].run_json(json.loads(one.arguments), CancellationToken(), call_id=one.id)
            text = tools[one.name].return_value_as_string(value)
            results.append(FunctionExecutionResult(content=text, call_id=one.id, is_error=False, name=one.name))
        messages.append(FunctionExecutionResultMessage(content=results))
    await model.close()


async def pydantic_ai() -> None:
    from pydantic_ai import Agent, ModelRetry

    def fail(name: str) -> str:
        DONE.append(f"fail {name}")
        raise ModelRetry(f"nobody is called {name}")

    await Agent("openai-chat:gpt-4o", tools=[pay, mail, fail]).run(QUESTION)


def run(agent: Callable[[], Awaitable[None]], script: list[list[dict[str, Any]]], tools: ToolPlayback | None) -> Any:
    """The requests of one run, and what its tools have done."""
    Handler.script, Handler.asked = script, []
    before = len(DONE)
    token = identity.set(Identity(token="lrl-test", gateway=urlsplit("http://127.0.0.1:9"), tools=tools))
    try:
        asyncio.run(agent())  # type: ignore[arg-type]
    except ToolWithheld as withheld:
        return str(withheld)
    finally:
        identity.reset(token)
    return {"asked": Handler.asked, "done": DONE[before:]}


def results(asked: list[dict[str, Any]], *, known: bool = True) -> list[ToolResult]:
    """What the last request of a run says."""
    calls = {one["id"]: one["function"] for message in asked[-1]["messages"] for one in message.get("tool_calls") or ()}
    return [
        ToolResult(
            id=message["tool_call_id"],
            name=calls[message["tool_call_id"]]["name"],
            arguments=calls[message["tool_call_id"]]["arguments"],
            text=message["content"] if known else None,
            missing="" if known else "it is not known",
        )
        for message in asked[-1]["messages"]
        if message["role"] == "tool"
    ]


def main(framework: str) -> None:
    agent = globals()[framework]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ.update(OPENAI_BASE_URL=f"http://127.0.0.1:{server.server_port}/v1", OPENAI_API_KEY="key")
        if framework in EARLY:
            tool_hooks.install()
        said: dict[str, Any] = {"trunk": run(agent, CALLS, None)}
        recorded = results(said["trunk"]["asked"])
        tool_hooks.install()
        said["again"] = run(agent, CALLS, ToolPlayback(Recorded(tools="never", results=recorded)))
        said["fresh"] = run(agent, NEW, ToolPlayback(Recorded(tools="never", results=recorded[:2])))
        said["plain"] = run(agent, CALLS, None)
        unknown = results(said["trunk"]["asked"], known=False)
        said["safe"] = run(agent, CALLS, ToolPlayback(Recorded(tools="safe", results=unknown)))
        if framework in ("openai_agents", "autogen", "pydantic_ai"):
            said["failing"] = run(agent, FAILING, None)
            failed = results(said["failing"]["asked"])
            said["failing again"] = run(agent, FAILING, ToolPlayback(Recorded(tools="never", results=failed)))
        if framework != "autogen":  # it waits forever for a tool that raises what is no `Exception`; the worker ends it
            said["withheld"] = run(agent, CALLS, ToolPlayback(Recorded(tools="never", results=unknown)))
        server.shutdown()
    sys.stdout.write(f"{json.dumps(said)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
