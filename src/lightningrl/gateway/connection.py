"""One HTTP/1.1 connection, with limits on headers and on the time that a request takes to arrive.

uvicorn's parser has neither limit: it collects headers of any length, and waits forever for the rest of a request.
"""

import asyncio
import re
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lightningrl.gateway.http import ABORT, HEADER_LIMIT

ARRIVAL_S = 120.0
"""Time for a request to arrive in full; then its connection is closed. 64 MB at 0.5 MB/s take as long."""
H2C = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c)", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """A connection with limits. It also serves clients that offer HTTP/2 in their first request, as Java's does.

    At such an offer the parser would stop reading HTTP and lose the body. So the offer is hidden from the parser: a
    server is free to ignore it (RFC 7230, 6.7).
    """

    _deadline: asyncio.TimerHandle | None = None
    """Set while a request is arriving."""
    _unread = 0
    """Bytes of headers, trailers and chunk sizes since the last piece of a body or the end of a request."""

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
            message = f"the headers have more than `{HEADER_LIMIT}` bytes"
            self._refuse(b"431 Request Header Fields Too Large", message, code="too_large")
            return
        if self._deadline is None:
            self._await_request()  # a lone line break, too, ends uvicorn's own wait for the next request
        self._unread += len(data)
        if b"h2c" in data and data.startswith(b"POST "):
            head, end, body = data.partition(b"\r\n\r\n")
            data = H2C.sub(b"\r\nx-offered:", head) + end + body
        super().data_received(data)

    def on_message_begin(self) -> None:
        if self._deadline is None:  # it arrived together with the end of the previous request
            self._await_request()
        super().on_message_begin()
        extensions: dict[str, Any] = {ABORT: self.transport.abort}
        self.scope["extensions"] = extensions

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
        if answering or self.pipeline:  # a pipelined request is not read before its turn
            self._await_request()
        elif not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", f"the request has not arrived within {ARRIVAL_S:g} s", code="timeout")

    def _refuse(self, status: bytes, message: str, *, code: str) -> None:
        """Close the connection, with an error response unless another response has been sent in part."""
        self._arrived()
        cycle = self.cycle
        if not self.pipeline and (cycle is None or cycle.response_complete or not cycle.response_started):
            body = msgspec.json.encode({"error": {"message": message, "code": code}})
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
