"""Which hosts may a request name? Others are refused, against DNS rebinding."""

import asyncio
import socket
from pathlib import Path

import pytest

from lightningrl.config import Config
from lightningrl.gateway.assembly import make_gateway
from lightningrl.gateway.hosts import KNOWN, Hosts

from .conftest import Stage, serving

GOOD = [
    "127.0.0.1:8100",
    "10.1.2.3",
    "[::1]:8100",
    "[fe80::1%eth0]",
    "localhost",
    "LOCALHOST:1",
    "localhost.",
    "a.b.localhost:8000",
    "lightningrl-server:8100",
    "Train.Example.ORG:443",
    "train.example.org.",
    "a.nodes.example.org",
    "",
    "  ",
]
BAD = [
    "evil.example",
    "evil.example:8100",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "nodes.example.org",
    "evilnodes.example.org",
    "train.example.org.evil",
    "user@localhost",
    "localhost/x",
    "localhost:80:80",
    "[evil.example]",
    "::1",
    "[::1",
    "1.2.3",
    "evil\u00e9.example",
]


@pytest.mark.parametrize("host", GOOD)
def test_these_hosts_are_good(host: str) -> None:
    assert Hosts(["train.example.org", "*.nodes.example.org"]).admits(host)


@pytest.mark.parametrize("host", BAD)
def test_these_hosts_are_not(host: str) -> None:
    assert not Hosts(["train.example.org", "*.nodes.example.org"]).admits(host)


def test_the_name_of_this_machine_is_good() -> None:
    assert Hosts().admits(socket.gethostname())


async def said(url: str, request: str) -> str:
    """The answer to a raw request."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer.decode()


async def test_every_route_refuses_a_foreign_host_before_it_looks_at_the_key(stage: Stage) -> None:
    attempt = await stage.begin()
    paths = [("GET", path) for path in ("/", "/health", "/models", "/nothing")]
    paths += [("POST", path) for path in ("/v1/chat/completions", "/traces", "/rewards", "/abandon", "/workers/hello")]
    for method, path in paths:
        head = f"{method} {path} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n"
        answer = await said(stage.url, f"{head}x-api-key: {attempt.token}\r\ncontent-length: 0\r\n\r\n")
        assert answer.startswith("HTTP/1.1 421 "), path
        assert "unknown_host" in answer
        assert "this server is not `evil.example`; hint: add the name to `gateway.hosts`" in answer
        assert "x-should-retry: false" in answer
        assert "access-control" not in answer.lower()


@pytest.mark.parametrize("head", ["HTTP/1.0", "HTTP/1.0\r\nhost: localhost", "HTTP/1.1\r\nHOST: 127.0.0.1:1"])
async def test_clients_that_name_no_host_or_a_good_one_are_served(stage: Stage, head: str) -> None:
    answer = await said(stage.url, f"GET /health {head}\r\nconnection: close\r\n\r\n")
    assert " 200 " in answer.split("\r\n")[0]


async def test_one_foreign_host_of_two_is_enough_to_refuse(stage: Stage) -> None:
    heads = "host: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
    assert " 421 " in (await said(stage.url, f"GET /health HTTP/1.1\r\n{heads}")).split("\r\n")[0]


def test_the_memory_of_good_hosts_is_limited() -> None:
    hosts = Hosts()
    for number in range(2 * KNOWN):
        hosts.check({"headers": [(b"host", f"name{number}".encode())]})
    assert len(hosts._known) == KNOWN


async def test_the_names_follow_from_the_settings(stage: Stage, tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "name": "x",
            "agent": {"entry": "a:b", "reward": "a:c"},
            "tasks": {"source": "a:d"},
            "model": {"path": "m"},
            "gateway": {
                "hosts": ["*.one.example"],
                "public_url": "https://two.example:8100/x",
                "host": "three.example",
            },
        }
    )
    gateway = make_gateway(config, store=stage.store, template=stage.template, engines={"policy": stage.engine})
    async with serving(gateway) as url:
        for host, status in (("a.one.example", 200), ("two.example", 200), ("three.example", 200), ("b.example", 421)):
            answer = await said(url, f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")
            assert answer.startswith(f"HTTP/1.1 {status} ")
