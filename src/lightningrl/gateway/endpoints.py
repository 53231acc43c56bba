"""What does the gateway serve besides calls? Health, models, telemetry, rewards, recorded tool results, embeddings; and
requests may end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lightningrl.dialects.base import Refused, invalid
from lightningrl.dialects.openai_wire import matched
from lightningrl.gateway import http, routing, workers
from lightningrl.gateway.body import decode
from lightningrl.gateway.http import Incoming, respond
from lightningrl.gateway.identity import LONGEST_NAME, REQUEST
from lightningrl.gateway.refusals import too_busy
from lightningrl.gateway.rewards import Rewards
from lightningrl.gateway.routing import Route
from lightningrl.gateway.sessions import Sessions
from lightningrl.gateway.tool_results import ToolResults
from lightningrl.gateway.traces import Traces
from lightningrl.gateway.upstream import Relayed, Upstream
from lightningrl.gateway.workers import Workers

EMBEDDINGS, ABANDON, TOOLS = "/embeddings", "/abandon", "/replay/tools"
ABANDON_LIMIT = 1024
"""Bytes of a body that gives up a request."""


class Endpoints:
    def __init__(
        self,
        sessions: Sessions,
        *,
        traces: Traces,
        rewards: Rewards,
        tools: ToolResults,
        embeddings: Upstream | None,
        workers: Workers | None = None,
        recorded: bool = False,
    ) -> None:
        """`embeddings`: the upstream for embedding requests; None: they are refused. `workers`: as `embeddings`.
        `recorded`: answers come from a recording.
        """
        self._recorded = recorded
        self._workers = workers
        self._sessions = sessions
        self._embeddings = embeddings
        self._tools = tools
        self._posts: Mapping[str, Traces | Rewards] = {"/traces": traces, "/rewards": rewards}

    async def serve(self, incoming: Incoming, routes: Sequence[Route], *, known: bool, busy: bool) -> None:
        """Raises `Refused`. `known`: the path is a dialect's, but the method is not POST. `busy`: see `too_busy`."""
        path, method = incoming.path, incoming.method
        if self._workers is not None and path.startswith(workers.PATH):
            await self._workers.serve(incoming)
        elif method in ("GET", "HEAD") and (body := _get(incoming, routes)) is not None:
            await respond(incoming.send, 200, body)
        elif (method, path) == ("GET", TOOLS):
            await self._tools.serve(incoming)
        elif method == "POST" and not known and path in self._posts:
            await self._posts[path].serve(incoming)
        elif (method, path) == ("POST", ABANDON):
            await self._abandon(incoming)
        elif method == "POST" and not known and (added := matched(path, EMBEDDINGS)) is not None:
            await self._embed(incoming, added, busy=busy)
        else:
            raise Refused(405 if known else 404, f"`{method} {path}` is not served here", code="not_found")

    async def _abandon(self, incoming: Incoming) -> None:
        """An agent has gone away, says the relay that it had asked: its request needs no answer."""
        caller = incoming.caller()
        await self._sessions.admit(caller)
        request_id = decode(await incoming.read(limit=ABANDON_LIMIT)).get("request")
        if not isinstance(request_id, str) or not 0 < len(request_id) <= LONGEST_NAME:
            raise invalid(f"`request` is `{request_id!r:.80}`", param="request", hint=f"send `{REQUEST.decode()}`")
        session = await self._sessions.open(caller)
        await session.unread.abandon(request_id)
        await respond(incoming.send, 200, {"request": request_id})

    async def _embed(self, incoming: Incoming, added: Mapping[str, Any], *, busy: bool) -> None:
        caller = incoming.caller()
        await self._sessions.admit(caller)
        body = await incoming.read()
        if busy:
            raise too_busy()
        session = await self._sessions.open(caller)
        session.spent.read(len(body))
        relayed = await http.while_there(incoming.receive, self._relayed(incoming, body, added))
        await self._sessions.check(session.attempt)
        await relayed.give(incoming.send)

    async def _relayed(self, incoming: Incoming, body: bytes, added: Mapping[str, Any]) -> Relayed:
        if self._recorded:
            hint = "answer them in the test itself, or leave them out of it"
            message = "embeddings are not recorded, so they cannot be played back"
            raise Refused(404, message, code="not_found", hint=hint, final=True)
        if self._embeddings is None:
            hint = "set `gateway.embeddings` to an upstream"
            raise Refused(404, "this server has no model for embeddings", code="not_found", hint=hint)
        raw = {**decode(body), **added}
        if added:  # Azure's clients name the model in the path
            body = msgspec.json.encode(raw)
        relayed, incoming = Relayed(), replace(incoming, path=EMBEDDINGS)
        await self._embeddings.relay(relayed, incoming, body=body, model=str(raw.get("model")))
        return relayed


def _get(incoming: Incoming, routes: Sequence[Route]) -> dict[str, Any] | None:
    """What is served without a token: health and models. None: the path is another."""
    path = incoming.path
    if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in incoming.scope["headers"]):
        hint = "send a POST, with `stream` if you like"
        raise Refused(426, "this server speaks HTTP", code="upgrade_required", hint=hint)
    if path in ("/", "/health"):
        return {"status": "ok"}
    if path == "/models":
        return routing.models(routes)
    return routing.model(routes, path.removeprefix("/models/")) if path.startswith("/models/") else None
