"""The same search as a server of MCP, over stdin and stdout, for one task: `python server.py '{"world": "heldout-0"}'`.

MCP has two kinds of failure. What a tool is told wrongly is its answer, and the model reads it. That a search has
failed is an error of the protocol: the agent raises, and nobody takes it for what was found.
"""

import json
import sys

from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.tools import Tool
from mcp_types import INTERNAL_ERROR
from search import SCHEMA, library_of

library = library_of(json.loads(sys.argv[1]))


def search(query: str) -> str:
    """look up"""
    try:
        return library.search(query)
    except Exception as error:  # whatever it is, it is not the model's mistake
        raise MCPError(INTERNAL_ERROR, f"search failed: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    tool = Tool.from_function(search, structured_output=False).model_copy(update={"parameters": SCHEMA})
    MCPServer("library", tools=[tool], log_level="ERROR").run()
