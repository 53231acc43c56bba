"""Who may read a run? Every address with every kind of caller. An address that has no row fails the test."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import pytest

from lightningrl.ui.app import EVENTS
from lightningrl.ui.files import PAGE
from lightningrl.ui.guard import HEADERS
from lightningrl.ui.routes import API
from tests.ui.conftest import ODD, Page

KEY = "a-key-that-was-made"
EXAMPLES: Mapping[str, str] = {
    "/": "/",
    "/{name}": "/app.js",
    "/api/runs": "/api/runs",
    "/api/runs/{run}": "/api/runs/one",
    "/api/runs/{run}/metrics": "/api/runs/one/metrics",
    "/api/runs/{run}/health": "/api/runs/one/health",
    "/api/runs/{run}/rollouts": "/api/runs/one/rollouts",
    "/api/runs/{run}/rollouts/{rollout}": f"/api/runs/one/rollouts/{quote(ODD, safe='')}",
    "/api/runs/{run}/rollouts/{rollout}/calls/{call}": f"/api/runs/one/rollouts/{quote(ODD, safe='')}/calls/1",
    "/api/runs/{run}/groups/{group}": "/api/runs/one/groups/g%2F1",
    "/api/runs/{run}/workers": "/api/runs/one/workers",
    "/api/runs/{run}/events": "/api/runs/one/events",
}
"""Route → an address that answers 200."""
LINK = "sec-fetch-site: cross-site\r\nsec-fetch-mode: navigate\r\nsec-fetch-dest: document"
FRAME = "sec-fetch-site: cross-site\r\nsec-fetch-mode: navigate\r\nsec-fetch-dest: iframe"
CALLERS: Mapping[str, tuple[str, int]] = {
    "a program": ("host: 127.0.0.1:{port}", 200),
    "the page": ("host: 127.0.0.1:{port}\r\nsec-fetch-site: same-origin", 200),
    "the page, by name": ("host: localhost:{port}\r\norigin: http://localhost:{port}", 200),
    "somebody who types the address": ("host: 127.0.0.1:{port}\r\nsec-fetch-site: none", 200),
    "another site": ("host: 127.0.0.1:{port}\r\nsec-fetch-site: cross-site\r\nsec-fetch-mode: no-cors", 403),
    "another site, by fetch": ("host: 127.0.0.1:{port}\r\norigin: https://evil.example", 403),
    "a file or a sandbox": ("host: 127.0.0.1:{port}\r\norigin: null", 403),
    "another server of this machine": ("host: 127.0.0.1:{port}\r\nsec-fetch-site: same-site", 403),
    "the same, by fetch": ("host: 127.0.0.1:{port}\r\norigin: http://127.0.0.1:1", 403),
    "no URL": ("host: 127.0.0.1:{port}\r\norigin: http://[", 403),
    "a frame of another site": ("host: 127.0.0.1:{port}\r\n" + FRAME, 403),
    "a rebound name": ("host: evil.example:{port}", 421),
    "a rebound name, by its own page": ("host: evil.example:{port}\r\norigin: http://evil.example:{port}", 421),
    "two hosts": ("host: localhost\r\nhost: evil.example", 421),
}
"""Caller → (its headers, status of every address)."""
KEYS: Mapping[str, tuple[str, int]] = {
    "none": ("x-none: 1", 401),
    "cookie": (f"cookie: other=1; lightningrl-{{port}}={KEY}", 200),
    "bearer": (f"authorization: Bearer {KEY}", 200),
    "a wrong cookie": (f"cookie: lightningrl-{{port}}={KEY[:-1]}", 401),
    "the cookie of another page": (f"cookie: lightningrl-1={KEY}", 401),
    "a broken cookie": ("cookie: ;;=,;lightningrl-{port}", 401),
    "a wrong bearer": ("authorization: Bearer \xe4", 401),
    "beside an odd cookie": (f'cookie: prefs={{{{"dark":true}}}}; lightningrl-{{port}}={KEY}; x y="', 200),
    "another scheme": (f"authorization: Basic {KEY}", 401),
    "an empty key": ("authorization: Bearer ", 401),
}


async def ask(port: int, path: str, headers: str, *, method: str = "GET") -> tuple[int, str]:
    """(status, head of the answer), by a raw request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = headers.format(port=port)
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\nconnection: close\r\n\r\n".encode("latin-1"))
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    finally:
        writer.close()
    return int(head.split()[1]), head.decode("latin-1").lower()


def test_every_route_has_a_row() -> None:
    assert {"/", "/{name}", *API, EVENTS} == EXAMPLES.keys()


@pytest.mark.parametrize("key", [None, KEY])
async def test_every_address_with_every_caller(run: Path, page: Page, key: str | None) -> None:
    bearer = "" if key is None else f"\r\nauthorization: Bearer {key}"
    async with page(run, key=key) as client:
        port = client.base_url.port or 0
        for path in EXAMPLES.values():
            for caller, (headers, status) in CALLERS.items():
                found, head = await ask(port, path, headers + bearer)
                assert found == status, (path, caller, head)
                assert "access-control" not in head and "set-cookie" not in head
                for name, value in HEADERS.items():
                    assert f"{name}: {value}".lower() in head, (path, caller, name)


async def test_a_link_from_elsewhere_opens_the_page_and_nothing_else(run: Path, page: Page) -> None:
    async with page(run) as client:
        port = client.base_url.port or 0
        for path in EXAMPLES.values():
            found, _ = await ask(port, path, "host: localhost\r\n" + LINK)
            assert found == (200 if path == "/" else 403), path


async def test_every_address_with_every_key(run: Path, page: Page) -> None:
    async with page(run, key=KEY) as client:
        port = client.base_url.port or 0
        for path in EXAMPLES.values():
            for name, (headers, status) in KEYS.items():
                found, head = await ask(port, path, "host: 127.0.0.1\r\n" + headers)
                assert found == status, (path, name)
                assert "set-cookie" not in head


async def test_the_printed_address_gives_the_browser_a_cookie_that_scripts_cannot_read(run: Path, page: Page) -> None:
    async with page(run, key=KEY) as client:
        port = client.base_url.port or 0
        found, head = await ask(port, f"/?key={KEY}", "host: localhost\r\n" + LINK)
        assert found == 200
        assert f"set-cookie: lightningrl-{port}={KEY}; path=/; httponly; samesite=strict" in head
        for path in (f"/?key={KEY[:-1]}", "/?key=", f"/api/runs?key={KEY}", f"/app.js?key={KEY}"):
            found, head = await ask(port, path, "host: localhost")
            assert found == 401 and "set-cookie" not in head, path


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_nothing_but_reading(run: Path, page: Page, method: str) -> None:
    async with page(run) as client:
        port = client.base_url.port or 0
        for path in EXAMPLES.values():
            found, head = await ask(port, path, "host: localhost", method=method)
            assert found == 405 and "access-control" not in head, path
        for path in ("/", "/app.js", "/api/runs"):
            assert (await ask(port, path, "host: localhost", method="HEAD"))[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../app.py",
        "/..%2fapp.py",
        "/%2e%2e/app.py",
        "/views/../../app.py",
        "/views/..%2f..%2fapp.py",
        "//etc/passwd",
        "/%2fetc%2fpasswd",
        "/views",
        "/vendor/",
        "/.git",
        "/app.js%00.html",
        "/app.js/",
        f"/{'x' * 300}.js",
        "/..%5capp.py",
        "/\xff",
        "/%ff%fe",
    ],
)
async def test_a_path_cannot_leave_the_page(run: Path, page: Page, path: str) -> None:
    assert (PAGE / "../app.py").is_file()
    async with page(run) as client:
        found, _ = await ask(client.base_url.port or 0, path, "host: localhost")
        assert found in (400, 404), path


@pytest.mark.parametrize("run_id", ["..", "%2e%2e", "..%2f..", "%2fetc", "one%00", "%ff", "one%2f.."])
async def test_the_name_of_a_run_is_never_a_path(run: Path, page: Page, run_id: str) -> None:
    async with page(run) as client:
        found, _ = await ask(client.base_url.port or 0, f"/api/runs/{run_id}/metrics", "host: localhost")
        assert found == 404
