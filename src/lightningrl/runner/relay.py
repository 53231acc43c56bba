"""Keeps agents connected to a server that restarts, or that the network cuts off.

An agent on a worker talks to the relay, on the worker's own machine, and the relay talks to the server:

    agent  ->  http://127.0.0.1:PORT  ->  https://server

Each request of a running attempt that samples gets an id, in the header `x-lightningrl-request`. If the connection
breaks before the agent has any of the answer, the relay sends the request again, with the same id, until the attempt
ends. The server gives each id exactly one answer. If a stream breaks after the agent has some of it, the attempt is
disturbed: it is lost, which costs its rollout nothing, and another attempt takes its place.
"""

import asyncio
import logging
import random
import re
import secrets
import ssl as tls
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from time import monotonic
from types import TracebackType
from urllib.parse import unquote_to_bytes, urlsplit

from lightningrl.errors import UserError
from lightningrl.runner.connections import AgentConnection, Broken, Client, Nobody, Request, ServerConnection

log = logging.getLogger(__name__)

TOKEN = re.compile(rb"lrl-[\w-]+")
"""The token of an attempt, wherever it stands: in a header of any vendor, in the path, or in the query."""
CONNECT_S = 10.0
WAITS_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Before a request is sent again: after its first failure, its second, and so on; the last one stays. Half of each is
random, so that a thousand workers do not come back at once.
"""
KEPT_S = 30.0
"""An idle connection to the server is used again for so long. Proxies close theirs after 60 s or more."""
ABANDON_S = 5.0
CONNECTIONS = 4096
"""Connections from agents; more are closed."""


@dataclass(slots=True, eq=False, kw_only=True)
class Attendance:
    """A running attempt, as the relay knows it."""

    attempt_id: str
    disturbed: str | None = None
    """Why its outcome does not count; None: it does."""
    serving: set["asyncio.Task[bool]"] = field(default_factory=set)
    """Its requests that are being answered."""


class Relay:
    """Serves agents at `url` while its block runs.

    async with Relay("https://server:8100") as relay:
        relay.begin(attempt.id, attempt.token)
        …                                         # run the agent with `relay.url` as its gateway
        why = relay.end(attempt.id)               # not None: the attempt is lost
    """

    def __init__(self, server_url: str, *, host: str = "127.0.0.1", ssl: tls.SSLContext | None = None) -> None:
        """`host`: the address of this machine at which agents reach the relay.

        `ssl`: for a server with certificates of its own; None: those of known authorities are trusted.
        """
        url = urlsplit(server_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(f"`{server_url}` is not the URL of a server", hint="e.g. `http://server:8100`")
        secure = url.scheme == "https"
        self.url = ""
        self._listens_on = host
        self._host, self._port = url.hostname, url.port or (443 if secure else 80)
        self._ssl = (ssl or tls.create_default_context()) if secure else None
        self._name = url.netloc.rpartition("@")[2].encode()
        self._base = url.path.rstrip("/").encode()
        self._attempts: dict[bytes, Attendance] = {}
        """By token."""
        self._agents: set[AgentConnection] = set()
        self._server: set[ServerConnection] = set()
        self._idle: list[ServerConnection] = []
        self._resting: set[asyncio.Future[None]] = set()
        """Requests that wait before they are sent again."""
        self._abandoning: set[asyncio.Task[None]] = set()
        self._away = False
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> "Relay":
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._agent, self._listens_on, 0, backlog=1024)
        except OSError as error:
            hint = "set `agent.relay_host` to an address of this machine"
            raise UserError(f"agents cannot be served at `{self._listens_on}`: {error.strerror}", hint=hint) from error
        self.url = f"http://{self._listens_on}:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None, "it was entered"
        self._listener.close()
        serving = [task for attempt in self._attempts.values() for task in attempt.serving]
        for task in (*serving, *self._abandoning):
            task.cancel()
        await asyncio.gather(*serving, *self._abandoning, return_exceptions=True)
        for agent in list(self._agents):
            agent.close()
        for connection in list(self._server):
            connection.abort()

    def begin(self, attempt_id: str, token: str) -> None:
        """From now on, requests with this token are sent again until they are answered."""
        self._attempts[token.encode()] = Attendance(attempt_id=attempt_id)

    def end(self, attempt_id: str) -> str | None:
        """Stop all requests of the attempt. Returns why it is disturbed, or None if it is not."""
        token = next((token for token, known in self._attempts.items() if known.attempt_id == attempt_id), None)
        if token is None:
            return None
        attempt = self._attempts.pop(token)
        for task in attempt.serving:
            task.cancel()
        return attempt.disturbed

    def server_away(self) -> None:
        """The server does not answer. Give all connections to it up: a network may have dropped what they sent."""
        self._away = True
        for connection in list(self._server):
            connection.abort()

    def server_back(self) -> None:
        """The server answers again. Send all requests again that wait for an answer: they may have been lost, too."""
        for connection in list(self._server) if self._away else ():
            if not connection.passed:
                connection.abort()
        self._away = False
        self._wake()

    def _wake(self) -> None:
        for resting in self._resting:
            if not resting.done():
                resting.set_result(None)

    def _agent(self) -> AgentConnection:
        return AgentConnection(self._serve, admit=self._admit, ended=self._agents.discard)

    def _admit(self, agent: AgentConnection) -> bool:
        self._agents.add(agent)
        return len(self._agents) <= CONNECTIONS

    async def _serve(self, request: Request, agent: AgentConnection) -> bool:
        """Answer one request. Returns whether the agent may send more on this connection."""
        if _is_for_workers(request):
            agent.refuse(403, "agents have no access to `/workers`", code="forbidden_path")
            return False
        attempt = self._attempt_of(request)
        if attempt is None:
            return await self._once(request, agent)
        request_id = secrets.token_hex(8).encode() if request.method == b"POST" else b""
        data = request.encoded(base=self._base, host=self._name, request_id=request_id)
        task = asyncio.current_task()
        assert task is not None
        attempt.serving.add(task)
        try:
            return await self._until_answered(attempt, request, data, agent)
        except Broken:  # the attempt is disturbed
            if request_id:
                self._abandon(request, request_id)
            return False
        except asyncio.CancelledError:
            if request_id:
                self._abandon(request, request_id)
            raise
        finally:
            attempt.serving.discard(task)

    async def _once(self, request: Request, agent: AgentConnection) -> bool:
        """Pass on a request without the token of a running attempt. It is for the server to refuse it."""
        if not _is_for_this_machine(request):
            agent.refuse(403, "this address is for programs of this machine", code="forbidden_host")
            return False
        data = request.encoded(base=self._base, host=self._name, request_id=b"")
        connection = None
        try:
            connection = await self._connected(fresh=True)
            return await self._ask(connection, request, data, agent) and request.keep_alive
        except Broken as broken:
            if connection is None or not connection.passed:
                agent.refuse(502, f"the server does not answer: {broken}", code="server_away")
            return False

    async def _until_answered(self, attempt: Attendance, request: Request, data: bytes, agent: AgentConnection) -> bool:
        """Send a request until it is answered. Raises `Broken` if its attempt is disturbed."""
        rewards = request.target.partition(b"?")[0].endswith(b"/rewards")
        failures = 0
        while True:
            connection = None
            try:
                connection = await self._connected(fresh=rewards or failures > 0)
                keep_alive = await self._ask(connection, request, data, agent)
                if failures:
                    self._wake()  # the server is back for the others, too
                return keep_alive and request.keep_alive and not request.upgrade
            except Broken as broken:
                if connection is not None and (connection.passed or rewards):
                    what = "in the middle of an answer" if connection.passed else "while it took a reward"
                    attempt.disturbed = attempt.disturbed or f"the connection to the server broke {what}: {broken}"
                    raise
                log.debug("attempt %s: a request is sent again: %s", attempt.attempt_id, broken)
            await self._rest(WAITS_S[min(failures, len(WAITS_S) - 1)])
            failures += 1

    async def _rest(self, wait_s: float) -> None:
        """Wait, until `server_back` at most."""
        resting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resting.add(resting)
        try:
            await asyncio.wait((resting,), timeout=wait_s * random.uniform(0.5, 1.0))
        finally:
            self._resting.discard(resting)

    async def _connected(self, *, fresh: bool) -> ServerConnection:
        """A connection to the server. `fresh`: one that has served no other request. Raises `Broken`."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.reusable and monotonic() - connection.idle_since < KEPT_S:
                return connection
            connection.abort()
        connecting = asyncio.get_running_loop().create_connection(
            lambda: ServerConnection(ended=self._disconnected), self._host, self._port, ssl=self._ssl
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await connecting
        except (OSError, TimeoutError) as error:  # an `SSLError` is an `OSError`
            raise Broken(f"cannot connect: {type(error).__name__}: {error}") from error
        self._server.add(connection)
        return connection

    async def _ask(self, connection: ServerConnection, request: Request, data: bytes, client: Client) -> bool:
        try:
            return await connection.ask(data, client, bodiless=request.method == b"HEAD")
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()

    def _disconnected(self, connection: ServerConnection) -> None:
        self._server.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _attempt_of(self, request: Request) -> Attendance | None:
        """The running attempt whose token a request has; None: there is none."""
        texts = (request.target, *(value for _, value in request.headers))
        tokens = (token for text in texts for token in TOKEN.findall(text))
        return next((self._attempts[token] for token in tokens if token in self._attempts), None)

    def _abandon(self, request: Request, request_id: bytes) -> None:
        """Tell the server that nobody waits for this answer any more, so that it stops sampling."""
        task = asyncio.get_running_loop().create_task(self._give_up(request, request_id))
        self._abandoning.add(task)
        task.add_done_callback(self._abandoning.discard)

    async def _give_up(self, request: Request, request_id: bytes) -> None:
        path, _, query = request.target.partition(b"?")
        prefix = b"/".join(path.split(b"/")[:3]) if path.startswith(b"/r/") else b""
        body = b'{"request":"%b"}' % request_id
        headers = [pair for pair in request.headers if not pair[0].lower().startswith(b"content-")]
        target = prefix + b"/abandon" + (b"?" + query if query else b"")
        told = replace(request, target=target, body=body, headers=[*headers, (b"content-type", b"application/json")])
        data = told.encoded(base=self._base, host=self._name, request_id=b"")
        with suppress(Broken, TimeoutError):
            async with asyncio.timeout(ABANDON_S):
                await self._ask(await self._connected(fresh=True), told, data, Nobody())


def _is_for_workers(request: Request) -> bool:
    """Whether the server, or a proxy before it, may read the path as one below `/workers`.

    An agent that has found a worker key could otherwise reward itself.
    """
    path, read = b"", re.split(rb"[?#]", request.target)[0]
    while path != read:
        path, read = read, unquote_to_bytes(read)
    return b"workers" in re.split(rb"[/\\;?#]", path)


def _is_for_this_machine(request: Request) -> bool:
    """A web page can send requests here if its domain name resolves to this machine: then `Host` is that name."""
    host = next((value for name, value in request.headers if name.lower() == b"host"), b"127.0.0.1")
    name = urlsplit(b"//" + host).hostname or b""
    with suppress(ValueError):
        return name == b"localhost" or ip_address(name.decode("latin-1")).is_loopback
    return False
