"""Recipes are scripts beside a recipe.toml, imported by plain names such as `agent`: here, for as long as one test file needs them."""

import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


class Recipe:
    """The modules of a recipe as attributes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@contextmanager
def imported(name: str) -> Iterator[Recipe]:
    folder = RECIPES / name
    names = {file.stem for file in folder.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    yield Recipe(folder)
    sys.path.remove(str(folder))
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(others)


@pytest.fixture(scope="module")
def sql() -> Iterator[Recipe]:
    with imported("sql_langgraph") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def errands() -> Iterator[Recipe]:
    with imported("errands") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def team() -> Iterator[Recipe]:
    with imported("multi_agent") as recipe:
        yield recipe


class Scripted(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers in the order it is told to, and remembers what it was asked."""

    daemon_threads = True
    answers: list[str | dict[str, Any]]
    """Text, or a whole message."""
    asked: list[dict[str, Any]]
    keys: list[str]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        answer = self.server.answers.pop(0)
        message = {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    with Scripted(("127.0.0.1", 0), Handler) as server:
        server.answers, server.asked, server.keys = [], [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "attempt-token")
        for name in [name for name in os.environ if name.startswith(("SQL_", "ERRANDS_", "TEAM_"))]:
            monkeypatch.delenv(name)
        yield server
        server.shutdown()
        thread.join(timeout=5)
