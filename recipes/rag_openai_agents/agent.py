"""An agent with OpenAI's Agents SDK that answers multi-hop questions: it searches for one fact after the other.

It is one agent with one tool, on the Responses API. It talks to the server that `OPENAI_BASE_URL` and `OPENAI_API_KEY`
name. More settings from the environment:

    RAG_MODEL            name of the model
    RAG_SEARCH           `local` (search in this process) or `mcp` (start an MCP server for each question)
    RAG_MAX_TURNS        calls of the model at most
    RAG_MAX_TOKENS       tokens of an answer at most
    RAG_DENSE_MODEL      see search.py
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import Agent, ModelSettings, RunConfig, RunContextWrapper, Runner, Tool, function_tool
from agents.exceptions import ModelBehaviorError, UserError
from agents.mcp import MCPServer, MCPServerStdio
from search import SCHEMA, Library, library_of

INSTRUCTIONS = "search, then answer as <answer> name </answer>"
SERVER = Path(__file__).parent / "server.py"
MAX_TURNS = 5
"""Enough for four searches and an answer."""
MAX_TOKENS = 24
UNFIT = "missing required parameters"
"""From the SDK's message for a call with missing arguments, which it does not send to the MCP server."""
CALL_S = 60.0
"""Timeout of the MCP server, for its start and for each answer."""


def told(_: RunContextWrapper[Any], error: Exception) -> str:
    """A malformed call is the model's mistake: the model reads the error. Any other error is raised."""
    if isinstance(error, ModelBehaviorError) or (isinstance(error, UserError) and UNFIT in str(error)):
        return "error: search needs a query"
    raise error


@function_tool(strict_mode=False, failure_error_function=told)
def search(context: RunContextWrapper[Library], query: str) -> str:
    """look up"""
    return context.context.search(query)


search.params_json_schema = SCHEMA


async def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """The agent's final answer; empty if it runs out of turns."""
    if os.environ.get("RAG_SEARCH", "local") == "local":
        return await answer(task["question"], researcher(tools=[search]), library=library_of(task))
    source = {key: task[key] for key in ("world", "paragraphs") if key in task}
    settings = {name: value for name, value in os.environ.items() if name.startswith("RAG_")}
    command: Any = {"command": sys.executable, "args": [str(SERVER), json.dumps(source)], "env": settings}
    async with MCPServerStdio(command, client_session_timeout_seconds=CALL_S, failure_error_function=told) as server:
        return await answer(task["question"], researcher(mcp_servers=[server]), library=None)


def researcher(*, tools: Sequence[Tool] = (), mcp_servers: Sequence[MCPServer] = ()) -> Agent[Library | None]:
    return Agent(
        name="researcher",
        instructions=INSTRUCTIONS,
        model=os.environ.get("RAG_MODEL", "researcher"),
        model_settings=ModelSettings(max_tokens=int(os.environ.get("RAG_MAX_TOKENS", MAX_TOKENS))),
        tools=[*tools],
        mcp_servers=[*mcp_servers],
    )


async def answer(question: str, agent: Agent[Library | None], *, library: Library | None) -> dict[str, Any]:
    result = await Runner.run(
        agent,
        question,
        context=library,
        max_turns=int(os.environ.get("RAG_MAX_TURNS", MAX_TURNS)),
        run_config=RunConfig(tool_not_found_behavior="return_error_to_model"),
        error_handlers={"max_turns": lambda _: ""},
    )
    return {"answer": result.final_output}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))
