"""The same search as a server of MCP, over stdin and stdout, for one task: `python server.py '{"world": "heldout-0"}'`."""

import json
import sys

from mcp.server.mcpserver import MCPServer
from search import library_of

server = MCPServer("library", log_level="ERROR")
library = library_of(json.loads(sys.argv[1]))


@server.tool(structured_output=False)
def search(query: str) -> str:
    """look up"""
    return library.search(query)


if __name__ == "__main__":
    server.run()
