"""One HTTP/1.1 connection: what may arrive on it before anybody knows whose it is, and in what time.

uvicorn's parser has no limits of its own: it gathers a header of any length, and waits for the rest of a request for
ever.
"""

import asyncio
import re
from typing import cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightningrl.gateway.http import HEADER_LIMIT

ARRIVAL_S = 120.0
"""A request has arrived in full after this time, or its connection is closed: 64 MB at 0.5 MB/s take as long."""
H2C = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c)", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """Also for clients that offer HTTP/2 with their first request, as Java's does. The parser would take that for the
    end of HTTP, and the body would be lost; so it does not get to see the offer, which a server is free to ignore (RFC
    7230, 6.7).
    """

    _deadline: asyncio.TimerHandle | None = None
    """Set while a request is arriving."""
    _unread = 0
    """Bytes since the last piece of a body or the end of a request: head, trailers, chunk sizes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._unread > HEADER_LIMIT:
            self._refuse(
                b"431 Request Header Fields Too Large",
                f"the headers have more than `{HEADER_LIMIT}` bytes",
                code="too_large",
            )
            return
        if self._deadline is None:
            self._await_request()  # also for a line break, which ends uvicorn's own wait for the next request
        self._unread += len(data)
        if b"h2c" in data and data.startswith(b"POST "):
            head, end, body = data.partition(b"\r\n\r\n")
            data = H2C.sub(b"\r\nx-offered:", head) + end + body
        super().data_received(data)

    def on_message_begin(self) -> None:
        if self._deadline is None:  # it came in one piece with the end of the request before it
            self._await_request()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        self._arrived()
        super().on_message_complete()

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(ARRIVAL_S, self._late)

    def _arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if answering or self.pipeline:  # nothing is read of a request that has come before its turn
            self._await_request()
        elif not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"the request has not arrived within {ARRIVAL_S:g} s", code="timeout")

    def _refuse(self, status: bytes, message: str, *, code: str) -> None:
        """End the connection; say why, unless an answer is half sent."""
        self._arrived()
        if not self.pipeline and (
            self.cycle is None or self.cycle.response_complete or not self.cycle.response_started
        ):
            body = msgspec.json.encode({"error": {"message": message, "code": code}})
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
