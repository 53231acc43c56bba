"""A request that no policy of ours answers goes to another server as it is, in its own dialect, and its answer comes
back as it is.

What was asked and answered is recorded before the client has all of it; it has no tokens, so it is never trained.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from lightningrl.dialects.base import Dialect, Refused, Reply
from lightningrl.errors import UserError
from lightningrl.gateway.generation import ENDED, GONE, NO_VERSION
from lightningrl.gateway.http import Send
from lightningrl.gateway.identity import KEYS
from lightningrl.types import Call, Sampling

RECORDED = 16 * 1024 * 1024
"""Bytes of an answer that a record keeps."""
SHOWN = 500
"""Bytes of an error that is not JSON, as it is told."""
CONNECT_S = 10.0
OURS = frozenset(
    {
        *(
            b"host",
            b"connection",
            b"keep-alive",
            b"proxy-connection",
            b"proxy-authorization",
            b"te",
            b"trailer",
            b"upgrade",
            b"http2-settings",
        ),
        *(b"content-length", b"transfer-encoding", b"content-encoding", b"accept-encoding", b"expect"),
        *(*KEYS, b"baggage", b"x-agent-name"),
    }
)
"""Headers that are not handed on: those of this connection, and whatever may hold an attempt's token."""
KEPT = frozenset(
    ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id", "cache-control")
)
"""Headers of the answer that are."""


@dataclass(slots=True, kw_only=True)
class Relayed:
    """What has come from an upstream so far."""

    started_at: float = field(default_factory=time.time)
    status: int = 0
    """0: it has not answered."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    """Of a stream, as much of it as a record keeps."""
    streamed: bool = False
    """The client has it already, all but its end."""
    broken: str | None = GONE
    """Why it is incomplete; assumed until the end has been seen."""

    def whole(self) -> bool:
        return self.broken is None

    async def give(self, send: Send) -> None:
        """All of it, to a client that has nothing yet."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": bytes(self.body)})


class HandedOn:
    """See `Delivery`. What an upstream says is given as it is; who repeats a request gets all of a stream at once."""

    def __init__(self, dialect: Dialect, send: Send, *, begun: Reply, live: Relayed | None) -> None:
        """`live`: pieces of a stream go to this client as they come. None: it repeats a request."""
        self._dialect = dialect
        self._send = send
        self._begun = begun
        self._live = live

    def begin(self) -> None:
        """Pieces are sent by `Upstream.relay`."""

    async def keep_alive(self) -> None:
        """That is up to the upstream."""

    async def give(self, answered: Relayed) -> None:
        if self._live is not None and self._live.streamed:
            await self._send({"type": "http.response.body", "body": b""})
        else:
            await answered.give(self._send)

    async def fail(self, refused: Refused) -> None:
        if self._live is None or not self._live.streamed:
            raise refused
        last = b"\n\n" + self._dialect.stream(self._begun).error(
            refused
        )  # it may have broken off in the middle of an event
        await self._send({"type": "http.response.body", "body": last})


class Upstream:
    """Another server."""

    def __init__(self, name: str, *, url: str, key_env: str = "", model: str = "") -> None:
        if key_env and key_env not in os.environ:
            raise UserError(
                f"`upstreams.{name}` wants its key in `{key_env}`, which is not set", hint=f"export {key_env}=…"
            )
        self.name = name
        self._url = url.rstrip("/")
        self._key = os.environ.get(key_env, "")
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def relay(
        self,
        relayed: Relayed,
        *,
        path: str,
        query: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        asked: str,
        send: Send,
    ) -> None:
        """Hand the request on and take down the answer; pieces of a stream go to the client as they come. `asked` is
        the model name in it. Raises `Refused` if the upstream does not answer.
        """
        if self._model:
            path, body = path.replace(f"/{asked}:", f"/{self._model}:"), _renamed(body, self._model)
        handed_on = "&".join(part for part in query.split("&") if part and not part.startswith("key="))
        url = f"{self._url}{path}" + (f"?{handed_on}" if handed_on else "")
        try:
            async with self._open().post(
                url, data=body, headers=self._headers(headers, query), allow_redirects=False
            ) as answer:
                if 300 <= answer.status < 400:
                    raise self._failed(
                        relayed, f"redirects to `{answer.headers.get('location')}`", hint="set that as its url"
                    )
                await _take(relayed, answer, send)
                if relayed.broken and not relayed.streamed and _object(relayed.body) is None:  # a proxy's page, say
                    page, waits = (
                        relayed.body[:SHOWN].decode(errors="replace").strip(),
                        answer.headers.get("retry-after", ""),
                    )
                    retry_after_s = float(waits) if waits.isdecimal() else None
                    raise Refused(
                        answer.status,
                        f"{relayed.broken}: {page or 'nothing'}",
                        code="upstream_error",
                        retry_after_s=retry_after_s,
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = "broke off" if relayed.status else "does not answer"
            raise self._failed(
                relayed, f"{what}: {type(error).__name__}: {error}", hint="is its url right, and does it run?"
            ) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=True
            )
        return self._session

    def _headers(self, headers: Iterable[tuple[bytes, bytes]], query: str) -> list[tuple[str, str]]:
        """The client's own, with our key where it had its token: that is where servers of this dialect look."""
        headers = list(headers)
        places = [name for name, _ in headers if name in KEYS] or [
            b"x-goog-api-key" if "key=" in query else b"authorization"
        ]
        kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name not in OURS]
        if self._key:
            kept += [
                (name.decode(), f"Bearer {self._key}" if name == b"authorization" else self._key) for name in places
            ]
        return kept

    def _failed(self, relayed: Relayed, what: str, *, hint: str) -> Refused:
        relayed.broken = f"the upstream `{self.name}` {what}"
        return Refused(502, relayed.broken, code="upstream_error", hint=hint)


def relayed_call(
    relayed: Relayed,
    *,
    call_id: str,
    index: int,
    attempt_id: str,
    agent: str,
    policy: str,
    dialect: str,
    body: Mapping[str, Any],
) -> Call:
    """The record of it."""
    nothing = np.array([], np.int32)
    return Call(
        id=call_id,
        attempt_id=attempt_id,
        index=index,
        parent_call_id=None,
        agent=agent,
        policy=policy,
        policy_version=NO_VERSION,
        dialect=dialect,
        request=body,
        response=_as_json(bytes(relayed.body[:RECORDED])),
        prompt_ids=nothing,
        completion_ids=nothing,
        logprobs=np.array([], np.float32),
        sampling=Sampling(),
        finish_reason="stop" if relayed.broken is None else "cancelled" if relayed.broken in (GONE, ENDED) else "error",
        capture="upstream" if relayed.broken is None else "incomplete",
        capture_reason=relayed.broken,
        started_at=relayed.started_at,
        ended_at=time.time(),
    )


async def _take(relayed: Relayed, answer: aiohttp.ClientResponse, send: Send) -> None:
    relayed.status = answer.status
    relayed.headers = [
        (name.lower().encode(), value.encode("latin-1"))
        for name, value in answer.headers.items()
        if name.lower() in KEPT
    ]
    relayed.streamed = answer.content_type == "text/event-stream"
    if relayed.streamed:
        await send({"type": "http.response.start", "status": relayed.status, "headers": relayed.headers})
        async for piece in answer.content.iter_any():
            if len(relayed.body) < RECORDED:
                relayed.body += piece
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    else:
        relayed.body += await answer.read()
    relayed.broken = None if answer.status < 400 else f"the upstream answered with status {answer.status}"


def _as_json(data: bytes) -> dict[str, Any]:
    """A stream as {"stream": all of its events}."""
    found = _object(data)
    return {"stream": data.decode(errors="replace")} if found is None else found


def _object(data: bytes | bytearray) -> dict[str, Any] | None:
    """The JSON object that it is; None: it is none."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _renamed(body: bytes, model: str) -> bytes:
    tree = msgspec.json.decode(body)
    if isinstance(tree, dict) and "model" in tree:
        tree["model"] = model
        return msgspec.json.encode(tree)
    return body
