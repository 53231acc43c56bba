"""A reverse proxy in front of a real server, on real sockets. It breaks the requests that a test names.

A proxy that is stopped in the middle of a request closes the connection, as a dying server would.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import httpx

Breakage = Literal["before", "after", "hang", "cut"]
SKIPPED = {
    "host",
    "transfer-encoding",
    "connection",
    "content-length",
    "content-encoding",
    "keep-alive",
    "date",
    "server",
}
ANSWER_S = 300.0
BROKEN = b'{"detail": "broken on purpose"}'


@dataclass(kw_only=True)
class Fault:
    """What happens to some requests."""

    path: str
    """The end of their path, e.g. `forward_backward`."""
    breaks: Breakage = "before"
    """`before`: answered with `status`, not forwarded. `after`: forwarded, answered with `status`. `hang`: forwarded,
    and not answered for `hang_s`. `cut`: forwarded, and the connection is closed.
    """
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    """Number of requests that break."""
    skip: int = 0
    """Number of requests that pass before."""
    hang_s: float = 30.0


@dataclass(kw_only=True)
class Proxy:
    """`faults` and `rewrite` may change while it runs."""

    target: str
    faults: list[Fault] = field(default_factory=list)
    rewrite: Callable[[str, bytes], bytes] | None = None
    """(path, body of an answer) → another body."""
    seen: list[tuple[str, int]] = field(default_factory=list)
    """(end of the path, status of the answer) of every request; 0: no answer."""
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, path: str) -> int:
        with self.lock:
            return sum(name == path for name, _ in self.seen)

    def fault_for(self, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if not path.endswith("/" + fault.path) or fault.times <= 0:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def note(self, path: str, status: int) -> None:
        with self.lock:
            self.seen.append((path.rsplit("/", 1)[-1], status))


@contextlib.contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy that answers at its `url`."""
    proxy = Proxy(target=target)
    with httpx.Client(base_url=target, timeout=ANSWER_S, limits=httpx.Limits(max_connections=256)) as client:
        server = _Front(proxy, client)
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)


class _Front(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: Proxy, client: httpx.Client) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy, self.client = proxy, client


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Front"  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._pass()

    def do_POST(self) -> None:
        self._pass()

    def _pass(self) -> None:
        proxy = self.server.proxy
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = proxy.fault_for(path)
        if fault is not None and fault.breaks == "before":
            self._answer(path, fault.status, fault.headers, BROKEN)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in SKIPPED}
        try:
            got = self.server.client.request(self.command, self.path, content=body, headers=headers)
        except httpx.HTTPError:
            self._drop(path)
            return
        if fault is None:
            content = proxy.rewrite(path, got.content) if proxy.rewrite else got.content
            kept = {name: value for name, value in got.headers.items() if name.lower() not in SKIPPED}
            self._answer(path, got.status_code, kept, content)
        elif fault.breaks == "after":
            self._answer(path, fault.status, fault.headers, BROKEN)
        else:
            time.sleep(fault.hang_s if fault.breaks == "hang" else 0)
            self._drop(path)

    def _drop(self, path: str) -> None:
        self.server.proxy.note(path, 0)
        self.close_connection = True

    def _answer(self, path: str, status: int, headers: dict[str, str], body: bytes) -> None:
        self.server.proxy.note(path, status)
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in ({"content-type": "application/json"} | headers).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""
