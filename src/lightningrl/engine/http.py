"""Which server gets a request, what do its answers say, and whose failure was it? The servers of one engine, and
server-sent events.

Connections are not capped: servers queue better than clients do. What a caller no longer waits for is closed at once,
which is how servers learn that a generation was cancelled (see `http_client`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from lightningrl.engine.base import EngineBusy, Unanswerable
from lightningrl.engine.http_client import Answer, Client, Connection
from lightningrl.errors import EngineError, UserError

RETRY_AFTER_S = 1.0
"""Where a busy server does not say."""
FULL = 2.0
"""A server that has this many times its share of the generations is passed over (bounded loads, arXiv 1608.01350)."""
TIMED_OUT = 408
"""The only status from 400 on, but for 429, that blames no request."""
COMPLETIONS = "/v1/completions"


@dataclass(slots=True, eq=False, kw_only=True)
class Server:
    url: str
    """Without `/v1` and without a slash at the end."""
    client: Client
    salt: bytes
    in_flight: int = 0


class _Problem(msgspec.Struct):
    message: str = ""


class _Failure(msgspec.Struct):
    """What servers say of an error: vLLM and OpenAI in `error`, FastAPI in `detail`."""

    error: _Problem | str | None = None
    detail: str | None = None
    message: str | None = None


_failure = msgspec.json.Decoder(_Failure)


class Pool:
    """The servers at `urls`."""

    def __init__(self, urls: Sequence[str], *, engine: str) -> None:
        if not urls:
            raise UserError(
                f"engine `{engine}` has no servers", hint='name them: `engine.urls=["http://127.0.0.1:8000"]`'
            )
        self.servers = [_server(url) for url in urls]

    def choose(self, key: bytes) -> Server:
        """The same server for the same key (rendezvous hashing: another server more or less moves few keys), unless it
        is overrun.
        """
        ranked = sorted(self.servers, key=lambda s: blake2b(key, key=s.salt, digest_size=8).digest())
        limit = 1 + FULL * sum(s.in_flight for s in self.servers) / len(self.servers)
        return next(s for s in ranked if s.in_flight < limit)

    async def complete(self, server: Server, body: bytes, *, hint: str | None = None) -> bytes:
        """The answer to a completion request. `hint`: what may be wrong if the server refuses."""
        return _accepted(server, await server.client.ask("POST", COMPLETIONS, body), hint=hint)

    async def stream(self, server: Server, body: bytes, *, hint: str | None = None) -> Connection:
        """The answer to a completion request that asks for a stream. Whoever gets it must close it."""
        answer = await server.client.stream(COMPLETIONS, body)
        if answer.status != 200:
            _accepted(server, answer.take(), hint=hint)
        return answer

    async def post(self, server: Server, path: str, payload: object = None, *, hint: str | None = None) -> bytes:
        body = b"" if payload is None else msgspec.json.encode(payload)
        return _accepted(server, await server.client.ask("POST", path, body), hint=hint)

    async def get(self, server: Server, path: str, *, hint: str | None = None, absent: bytes | None = None) -> bytes:
        """`absent`: what a 404 stands for; None: it is an error."""
        answer = await server.client.ask("GET", path, b"")
        return absent if answer.status == 404 and absent is not None else _accepted(server, answer, hint=hint)

    async def close(self) -> None:
        """Whoever still reads or waits hears of it by an `EngineError`."""
        for server in self.servers:
            await server.client.close()


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The data of the server-sent events in `data`, comments and `[DONE]` left out; and what comes after the last event
    that is whole.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    *whole, rest = data.split(b"\n\n")
    return [event[6:] for event in whole if event.startswith(b"data: ") and event != b"data: [DONE]"], rest


def unreadable(server: Server, error: msgspec.MsgspecError) -> EngineError:
    return EngineError(
        f"`{server.url}` answered what cannot be read: {error}",
        hint="is it the kind of server that `engine.name` says?",
    )


def _accepted(server: Server, answer: Answer, *, hint: str | None) -> bytes:
    """The body. A refusal is raised as the error it is."""
    if answer.status == 200:
        return answer.body
    message = f"`{server.url}` answered {answer.status}: {_message(answer.body)}"
    if answer.status in (429, 503):
        raise EngineBusy(message, retry_after_s=_seconds(answer.header("Retry-After")))
    if location := answer.header("Location"):
        hint = f"it sends to `{location}`: write into `engine.urls` where it really is"
    raise (Unanswerable if 400 <= answer.status < 500 and answer.status != TIMED_OUT else EngineError)(
        message, hint=hint
    )


def _message(body: bytes) -> str:
    try:
        failure = _failure.decode(body)
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace").strip() or "nothing"
    error = failure.error.message if isinstance(failure.error, _Problem) else failure.error
    return error or failure.detail or failure.message or body[:500].decode(errors="replace")


def _seconds(retry_after: str | None) -> float:
    """Of the header `Retry-After`; a date counts as not said."""
    try:
        seconds = float(retry_after or RETRY_AFTER_S)
    except ValueError:
        return RETRY_AFTER_S
    return seconds if math.isfinite(seconds) and seconds >= 0 else RETRY_AFTER_S


def _server(url: str) -> Server:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        client = Client(base)
    except ValueError as error:
        raise UserError(
            f"`{url}` in `engine.urls` is not the address of a server", hint="write it as `http://host:port`"
        ) from error
    return Server(url=base, client=client, salt=blake2b(base.encode(), digest_size=16).digest())
