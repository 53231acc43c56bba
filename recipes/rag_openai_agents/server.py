"""The same search as a server of MCP, over stdin and stdout, for one task: `python server.py '{"world": "heldout-0"}'`."""

import json
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.tools import Tool
from search import SCHEMA, library_of

library = library_of(json.loads(sys.argv[1]))


def search(query: str) -> str:
    """look up"""
    return library.search(query)


if __name__ == "__main__":
    tool = Tool.from_function(search, structured_output=False).model_copy(update={"parameters": SCHEMA})
    MCPServer("library", tools=[tool], log_level="ERROR").run()
