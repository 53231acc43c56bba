"""A call that another server answers. It is recorded before the client has all of it.

Its record has no token ids, so it is never trained.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightningrl.dialects.base import ChatRequest, Dialect, Past, Refused, Reply
from lightningrl.gateway import routing
from lightningrl.gateway.asked import Asked
from lightningrl.gateway.backend import Backend
from lightningrl.gateway.generation import NO_VERSION
from lightningrl.gateway.http import Incoming, Send
from lightningrl.gateway.refusals import ENDED, GONE
from lightningrl.gateway.upstream import RECORDED, Relayed, Upstream, json_object
from lightningrl.types import Call, FinishReason, Sampling


class Relay:
    """One request, answered by an upstream. See `answering.Work`."""

    def __init__(self, backend: Backend, upstream: Upstream, incoming: Incoming, body: bytes, *, asked: Asked) -> None:
        session, dialect, request = asked.session, asked.dialect, asked.request
        self._backend = backend
        self._upstream = upstream
        self._incoming = incoming
        self._body = body
        self._asked = asked
        self._session = session
        self._request = request
        self._relayed = Relayed()
        if request.counted is None:  # a request that only counts tokens is no call
            session.spent.ask(1)
        self._index = session.next_index()
        self._call_id = asked.call_id(self._index)
        begun = Reply(
            id=self._call_id,
            request=request,
            created=int(self._relayed.started_at),
            prompt_tokens=0,
            reused_tokens=0,
            choices=(),
        )
        self.delivery = partial(Forwarded, dialect, begun)

    def sampled(self) -> bool:
        return self._relayed.broken is None

    async def run(self, delivery: "Forwarded") -> Relayed:
        relayed = delivery.live = self._relayed
        try:
            await self._upstream.relay(relayed, self._incoming, body=self._body, model=self._request.model)
        except asyncio.CancelledError as cancelled:
            relayed.broken = ENDED if ENDED in cancelled.args else GONE
            raise
        finally:
            if self._request.counted is None:
                call = self._call()
                await self._backend.record(self._session.attempt, call)
                if call.capture != "incomplete":
                    self._session.given(call)
        return relayed

    def _call(self) -> Call:
        relayed = self._relayed
        body = relayed.body[:RECORDED]
        response = json_object(body)
        if response is None:
            response = {"stream": body.decode(errors="replace")}
        finish_reason: FinishReason = "stop"
        if relayed.broken is not None:
            finish_reason = "cancelled" if relayed.broken in (GONE, ENDED) else "error"
        return Call(
            id=self._call_id,
            attempt_id=self._session.attempt.id,
            index=self._index,
            parent_call_id=None,
            agent=self._asked.agent,
            policy=self._asked.policy,
            policy_version=NO_VERSION,
            dialect=self._asked.dialect.name,
            request=self._request.body,
            response=response,
            prompt_ids=np.array([], np.int32),
            completion_ids=np.array([], np.int32),
            logprobs=np.array([], np.float32),
            sampling=Sampling(),
            finish_reason=finish_reason,
            capture="upstream" if relayed.broken is None else "incomplete",
            capture_reason=relayed.broken,
            started_at=relayed.started_at,
            ended_at=time.time(),
            request_id=self._asked.request_id,
        )


class Forwarded:
    """Sends an upstream's answer to a client, as it is. See `delivery.Delivery`."""

    def __init__(self, dialect: Dialect, begun: Reply, send: Send) -> None:
        self._dialect = dialect
        self._begun = begun
        self._send = send
        self.live: Relayed | None = None
        """The answer that this client follows live. None: it repeats a request, and gets all of a stream at once."""

    def begin(self) -> None:
        """`Upstream.relay` sends the pieces."""

    async def keep_alive(self) -> None:
        """The upstream keeps its stream alive."""

    async def give(self, answered: Relayed) -> None:
        if self._follows():
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await answered.give(self._send)

    async def fail(self, refused: Refused) -> None:
        if not self._follows():
            raise refused
        event = self._dialect.stream(self._begun).error(refused)
        await self._send({"type": "http.response.body", "body": b"\n\n" + event})  # in case an event broke off

    def _follows(self) -> bool:
        return self.live is not None and self.live.streamed


def outline(dialect: Dialect, raw: Mapping[str, Any], past: Past) -> ChatRequest:
    """As much of a request that cannot be parsed as its route needs: an upstream may understand the rest."""
    with contextlib.suppress(Refused):
        return replace(dialect.parse(routing.opening(raw), past), body=raw)
    return ChatRequest(body=raw, model=str(raw.get("model", "")))
