"""The same search as an MCP server over stdin and stdout, for one task: `python server.py '{"world": "heldout-0"}'`.

MCP has two kinds of failure. Bad arguments are the tool's answer, which the model reads. A failed search is a protocol
error, which makes the agent raise.
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
