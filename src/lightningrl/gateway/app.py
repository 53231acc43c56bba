"""The gateway, an ASGI application. It answers the calls of agents and records them. The way of one call:

1.  An agent's SDK posts a request. `Gateway._serve` finds the dialect of its path, e.g. `/chat/completions` is
    `openai.chat`, and reads the attempt's token from it (`identity.py`: API key, path or baggage header).
    `Sessions.admit` looks the token up in the store: unknown tokens and ended attempts are refused.
2.  `_Request.answer` decodes the body. `Sessions.open` returns what the gateway remembers of the attempt
    (`sessions.py`), and `Dialect.parse` turns the body into a `ChatRequest`, which is the same for all dialects.
3.  `routing.choose` picks the first route that fits: it names the policy that answers, and the agent's role.
4.  `Prompts.of` makes the prompt. `ConversationTree.prompt` (`chat/tree.py`) finds the longest earlier call that this
    conversation continues, takes its exact token ids, and renders only the new messages behind them. If no call fits
    without doubt, it renders all messages afresh, and the call is a new root or a fork.
5.  `Exchange` (`capture.py`) plans a `Generation` (`generation.py`) for each answer: its sampling settings and seed
    (`sampling.py`), and the grammar for constrained decoding (`constraint.py`).
6.  `Exchange.run` samples: `Engine.generate` gets token ids, and yields token ids and log-probabilities. A stream shows
    their text at once, through `Delivery.begin` (`delivery.py`).
7.  `Exchange.run` makes a `Call` of them and appends it to the store. Then the conversation tree remembers it.
8.  `Answering.hand_over` (`answering.py`) has waited for this. `Delivery.give` now sends the response, or the end of
    the stream, in the request's own dialect. So an agent has the end of an answer only if the call is durable.

Read this file, `capture.py` and `generation.py` for one call. The rest is for rare cases: repeated requests and clients
that go away (`answering.py`, `recorded.py`), other servers (`relay.py`), branches that get recorded answers again
(`playback.py`, `branched.py`), everything but calls (`endpoints.py`).

It is a raw ASGI callable: it costs 1.7 times less per request than Starlette's router, and sees at once when a client
goes away.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightningrl.chat import Prompt
from lightningrl.dialects.base import ChatRequest, Dialect, Refused
from lightningrl.gateway import http, routing
from lightningrl.gateway.answering import Answering, Work
from lightningrl.gateway.asked import Asked
from lightningrl.gateway.backend import Backend
from lightningrl.gateway.body import understood
from lightningrl.gateway.branched import Branched, RelayedAgain, differs
from lightningrl.gateway.capture import Exchange, bounds
from lightningrl.gateway.delivery import Delivery
from lightningrl.gateway.endpoints import Endpoints
from lightningrl.gateway.hosts import Hosts
from lightningrl.gateway.http import Gone, Incoming, Receive, Scope, Send, respond
from lightningrl.gateway.identity import Caller
from lightningrl.gateway.playback import Playback, conversation_key, keys_of
from lightningrl.gateway.prompts import Prompts
from lightningrl.gateway.recorded import recorded
from lightningrl.gateway.refusals import is_shutdown, refusal_of, too_busy
from lightningrl.gateway.relay import Relay, outline
from lightningrl.gateway.routing import Route
from lightningrl.gateway.sessions import Session, Sessions
from lightningrl.gateway.upstream import Upstream

MAX_IN_FLIGHT = 8192
"""Requests that are answered at once; more are refused with status 429."""
VENDORS: tuple[tuple[bytes, str], ...] = (
    (b"anthropic-version", "anthropic.messages"),
    (b"x-goog-api-key", "google.gemini"),
)
"""Headers that determine the dialect of an error response if the path matches no dialect."""


class Gateway:
    """An ASGI application."""

    def __init__(
        self,
        backend: Backend,
        *,
        routes: Sequence[Route],
        dialects: Sequence[Dialect],
        sessions: Sessions,
        upstreams: Mapping[str, Upstream],
        endpoints: Endpoints,
        hosts: Hosts,
    ) -> None:
        self.backend = backend
        self.routes = tuple(routes)
        self.sessions = sessions
        self.upstreams = upstreams
        self.prompts = Prompts(backend.template, most=backend.max_length - 1)
        self._dialects = {dialect.name: dialect for dialect in dialects}
        self._endpoints = endpoints
        self._hosts = hosts
        self._max_in_flight = MAX_IN_FLIGHT
        self._in_flight = 0
        self.refusals: dict[str, int] = {}
        """Status and code → number of requests that were refused so."""
        self.complaints: dict[str, str] = {}
        """Status and code → message of the first such refusal."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await http.other(scope, receive, send)
            return
        self._in_flight += 1
        try:
            await self._serve(http.incoming(scope, receive, send))
        finally:
            self._in_flight -= 1

    async def _serve(self, incoming: Incoming) -> None:
        """Answer one HTTP request. Whatever goes wrong, the client gets a response in its own dialect."""
        dialect, added = self._dialect_of(incoming)
        try:
            self._hosts.check(incoming.scope)
            if dialect is None or incoming.method != "POST":
                known, busy = dialect is not None, self._is_busy()
                await self._endpoints.serve(incoming, self.routes, known=known, busy=busy)
                return
            caller = incoming.caller()
            await self.sessions.admit(caller)  # before the body is read: a stranger's is not
            body = await incoming.read()
            if self._is_busy():
                await self._turn_away(incoming, caller, body)
            await _Request(self, incoming, dialect, caller).answer(body, added)
        except Gone:
            return
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - every failure gets an error response
            if is_shutdown(error) and incoming.caller().request_id:
                await incoming.break_off()  # its client sends it again, to the server that comes next
                return
            await self._refuse(dialect or self._guess(incoming), refusal_of(error), incoming.send)

    def _dialect_of(self, incoming: Incoming) -> tuple[Dialect | None, Mapping[str, Any]]:
        """The dialect of a path, and the fields of the body that stand in the path."""
        for dialect in self._dialects.values():
            added = dialect.match(incoming.path, incoming.query)
            if added is not None:
                return dialect, added
        return None, {}

    def _is_busy(self) -> bool:
        return self._in_flight > self._max_in_flight

    async def _turn_away(self, incoming: Incoming, caller: Caller, body: bytes) -> None:
        session = await self.sessions.open(caller)
        session.unread.failed((await understood(incoming.path, body))[1])
        raise too_busy()

    async def _refuse(self, dialect: Dialect, refused: Refused, send: Send) -> None:
        name = f"{refused.status} {refused.code or ''}".strip()
        self.refusals[name] = self.refusals.get(name, 0) + 1
        self.complaints.setdefault(name, refused.message)
        body, wait_s = dialect.error(refused), refused.retry_after_s
        await respond(send, refused.status, body, retry_after_s=wait_s, final=refused.final)

    def _guess(self, incoming: Incoming) -> Dialect:
        """The dialect of an error response if the path matches no dialect."""
        headers = {name for name, _ in incoming.scope["headers"]}
        names = [name for header, name in VENDORS if header in headers]
        known = [self._dialects[name] for name in (*names, "openai.chat") if name in self._dialects]
        return known[0] if known else next(iter(self._dialects.values()))


class _Request:
    """One call of an agent, from its body to the last byte of the answer."""

    def __init__(self, gateway: Gateway, incoming: Incoming, dialect: Dialect, caller: Caller) -> None:
        self._gateway = gateway
        self._incoming = incoming
        self._dialect = dialect
        self._caller = caller

    async def answer(self, body: bytes, added: Mapping[str, Any]) -> None:
        """Raises `Refused` if nothing has been sent yet. `added`: fields of the body that stand in the path."""
        receive = self._incoming.receive
        raw, digest = await understood(self._incoming.path, body)
        session = await self._gateway.sessions.open(self._caller)
        with session.busy():
            request = self._parse({**raw, **added} if added else raw, session)
            pure = session.playback is not None and session.playback.pure
            if request.counted is not None and (pure or self._upstream_of(request) is None):
                session.spent.read(len(body))
                count = await self._gateway.prompts.count(session, request, receive)
                await respond(self._incoming.send, 200, request.counted(count))
                return
            name, sessions = self._caller.request_id, self._gateway.sessions
            if name:
                async with session.unread.turn(name):
                    answering, delivery = await self._begun(session, request, body, digest)
            else:
                answering, delivery = await self._begun(session, request, body, digest)
            check = partial(sessions.check, session.attempt)
            await answering.hand_over(delivery, receive, request_id=name, check=check)

    async def _begun(
        self, session: Session, request: ChatRequest, body: bytes, digest: bytes
    ) -> tuple[Answering, Delivery]:
        """The answer to this request, in the making or ready, and how this client gets it. Raises `Refused`."""
        name, unread, send = self._caller.request_id, session.unread, self._incoming.send
        answering = unread.named(name)
        if answering is None and self._caller.retries and name not in session.answered:
            answering = unread.join(digest, request_id=name)
        if answering is not None:
            return answering, answering.delivery(send)
        work = await self._work(session, request, body)
        delivery = work.delivery(send)
        return unread.begin(digest, work, delivery, request_id=name), delivery

    def _parse(self, raw: Mapping[str, Any], session: Session) -> ChatRequest:
        try:
            return self._dialect.parse(raw, session.past)
        except Refused:
            request = outline(self._dialect, raw, session.past)
            recorded = session.playback is not None and session.playback.relayed(request, self._dialect)
            if not recorded and self._upstream_of(request) is None:
                raise
            return request  # an upstream may understand what the gateway does not, e.g. pictures

    def _upstream_of(self, request: ChatRequest) -> Upstream | None:
        """The upstream that the request's route leads to. None: an engine answers, or no route fits."""
        with contextlib.suppress(Refused):
            return self._gateway.upstreams.get(self._route(request).policy)
        return None

    def _route(self, request: ChatRequest) -> Route:
        return routing.choose(self._gateway.routes, request, caller=self._caller.agent)

    async def _work(self, session: Session, request: ChatRequest, body: bytes) -> Work:
        """Prepare the answer. Raises `Refused` for a request that cannot be answered."""
        gateway, incoming, request_id = self._gateway, self._incoming, self._caller.request_id
        if request_id in session.answered:
            store = gateway.backend.store
            return await recorded(store, session.attempt, self._dialect, request, request_id=request_id)
        session.spent.read(len(body), request_id=request_id)
        route = self._route(request)
        asked = Asked(
            session=session,
            dialect=self._dialect,
            request=request,
            policy=route.policy,
            agent=routing.role(route, request, caller=self._caller.agent),
            request_id=request_id,
        )
        upstream = gateway.upstreams.get(route.policy)
        if session.playback is not None and request.counted is None:  # counts are not recorded
            return await self._branched(asked, session.playback, upstream, body)
        if upstream is not None:
            return Relay(gateway.backend, upstream, incoming, body, asked=asked)
        prompts = await gateway.prompts.of(session, request, incoming.receive)
        session.unread.check(request_id)  # an exchange takes randomness
        return Exchange(gateway.backend, asked, prompts=prompts)

    async def _branched(self, asked: Asked, playback: Playback, upstream: Upstream | None, body: bytes) -> Work:
        """Prepare an answer from the record, or afresh. Raises `Refused` for a request that differs from the record."""
        backend, session, request, dialect = self._gateway.backend, asked.session, asked.request, asked.dialect
        relayed = playback.relayed(request, dialect)
        if upstream is not None or playback.again(relayed):
            prompts: Sequence[Prompt] = ()
            keys = relayed or [conversation_key(request.body, dialect)]
        else:
            prompts = await self._gateway.prompts.of(session, request, self._incoming.receive)
            if not relayed and not asked.policy.startswith("upstreams."):
                bounds(backend, request, prompts)  # what the trunk was refused is refused again, and is no difference
            keys = relayed or keys_of([prompt.ids for prompt in prompts], request, dialect)
        session.unread.check(asked.request_id)
        found = playback.find(keys)
        if found is None:
            raise await differs(backend, asked, playback, prompts=prompts)
        played = [playback.played(record) for record in found]
        if relayed and played[0] is not None:
            work: Work = RelayedAgain(backend, asked, played[0])
        elif upstream is not None:
            work = Relay(backend, upstream, self._incoming, body, asked=asked)
        else:
            work = Exchange(backend, asked, prompts=prompts, records=() if relayed else played)
        return Branched(work, playback, found)
