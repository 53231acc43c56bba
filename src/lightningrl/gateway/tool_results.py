"""`GET /v1/replay/tools`: which recorded tool results does a branch's attempt play back?

The client's side is the worker that runs the attempt, and `lightningrl.replayed`.
"""

from lightningrl.gateway import http
from lightningrl.gateway.http import Incoming
from lightningrl.gateway.sessions import Sessions
from lightningrl.gateway.threads import in_thread
from lightningrl.store import Records
from lightningrl.tracing.tool_results import Recorded, Tools, tool_results


class ToolResults:
    """Tells attempts of branches the results of their trunk's tools, if the recipe says so (`replay.tools`)."""

    def __init__(self, sessions: Sessions, recordings: Records, *, tools: Tools) -> None:
        """`recordings`: has the trunks."""
        self._sessions = sessions
        self._recordings = recordings
        self._tools: Tools = tools

    async def serve(self, incoming: Incoming) -> None:
        """Raises `Refused`."""
        rollout, _ = await self._sessions.admit(incoming.caller())
        branch, recorded = rollout.branch, Recorded()
        if branch is not None and self._tools != "rerun":
            trunk = await self._recordings.calls([branch.attempt_id])
            recorded = Recorded(tools=self._tools, results=await in_thread(tool_results, trunk, branch))
        await http.respond(incoming.send, 200, recorded)
