"""An agent that answers questions of several steps: it searches for one fact after the other, and says what it has found.

An ordinary program with OpenAI's Agents SDK: one agent with one tool, on the Responses API. It talks to whatever `OPENAI_BASE_URL` and
`OPENAI_API_KEY` point at.

Settings come from the environment. RAG_MODEL names the model. RAG_SEARCH is `local` (search in this process) or `mcp` (start an MCP server for each
question). RAG_MAX_TURNS is how often the model is called at most, RAG_MAX_TOKENS limits an answer. RAG_DENSE_MODEL: see search.py.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agents import Agent, ModelSettings, RunConfig, RunContextWrapper, Runner, function_tool
from agents.exceptions import ModelBehaviorError
from agents.mcp import MCPServerStdio
from search import Library, library_of

INSTRUCTIONS = "search, then answer as <answer>name</answer>"
SERVER = Path(__file__).parent / "server.py"
MAX_TURNS = 6
"""Four steps take five: a search for each, and the answer."""
MAX_TOKENS = 24
CALL_S = 30.0
"""What a server of MCP gets for one answer."""


def told(_: RunContextWrapper[Any], error: Exception) -> str:
    """A call that cannot be understood is the model's mistake, and it is told. Anything else is nobody's answer."""
    if isinstance(error, ModelBehaviorError):
        return "error: search needs a query"
    raise error


@function_tool(strict_mode=False, failure_error_function=told)
def search(context: RunContextWrapper[Library], query: str) -> str:
    """look up"""
    return context.context.search(query)


@asynccontextmanager
async def researcher(task: Mapping[str, Any]) -> AsyncIterator[Agent[Library]]:
    tokens = int(os.environ.get("RAG_MAX_TOKENS", MAX_TOKENS))
    agent = Agent[Library](
        name="researcher",
        instructions=INSTRUCTIONS,
        model=os.environ.get("RAG_MODEL", "researcher"),
        model_settings=ModelSettings(max_tokens=tokens),
    )
    if os.environ.get("RAG_SEARCH", "local") == "local":
        yield agent.clone(tools=[search])
        return
    command: Any = {"command": sys.executable, "args": [str(SERVER), json.dumps(task)], "env": dict(os.environ)}
    async with MCPServerStdio(command, client_session_timeout_seconds=CALL_S, failure_error_function=told) as server:
        yield agent.clone(mcp_servers=[server])


async def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """The last words of the agent; none if it is still searching when its turns are over."""
    async with researcher(task) as agent:
        result = await Runner.run(
            agent,
            task["question"],
            context=library_of(task),
            max_turns=int(os.environ.get("RAG_MAX_TURNS", MAX_TURNS)),
            run_config=RunConfig(tool_not_found_behavior="return_error_to_model"),
            error_handlers={"max_turns": lambda _: ""},
        )
    return {"answer": result.final_output}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))
