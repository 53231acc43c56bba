"""Imports a recipe's modules by their plain names, such as `agent`, for the length of one test file."""

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
def scratch() -> Iterator[Recipe]:
    with imported("from_scratch") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def sql() -> Iterator[Recipe]:
    with imported("sql_langgraph") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def errands() -> Iterator[Recipe]:
    with imported("errands") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def math() -> Iterator[Recipe]:
    with imported("math_autogen") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def team() -> Iterator[Recipe]:
    with imported("multi_agent") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def rag() -> Iterator[Recipe]:
    with imported("rag_openai_agents") as recipe:
        yield recipe


@pytest.fixture(scope="module")
def shop() -> Iterator[Recipe]:
    with imported("node_vercel") as recipe:
        yield recipe


class Scripted(ThreadingHTTPServer):
    """An OpenAI-compatible server with scripted answers. It records the requests: chat completions or responses."""

    daemon_threads = True
    answers: list[str | dict[str, Any]]
    """Text, or a whole message."""
    asked: list[dict[str, Any]]
    keys: list[str]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted  # pyright: ignore[reportIncompatibleVariableOverride] - its only server

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.keys.append(self.headers["authorization"])
        answer = self.server.answers.pop(0)
        message = {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}
        if self.path.endswith("/responses"):
            reply = response(message, number=len(self.server.asked))
        else:
            reply = completion(message, self.server.asked[-1]["model"])
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("connection", "close")  # a client may outlive the event loop of its connections
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def completion(message: dict[str, Any], model: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop", "message": message}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}


def response(message: dict[str, Any], *, number: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for call in message.get("tool_calls", ())
    ]
    if not items:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        items = [
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [part]}
        ]
    more = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": "m",
        "status": "completed",
        "output": items,
        **more,
    }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    with Scripted(("127.0.0.1", 0), Handler) as server:
        server.answers, server.asked, server.keys = [], [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "attempt-token")
        for name in [
            name for name in os.environ if name.startswith(("SQL_", "ERRANDS_", "TEAM_", "RAG_", "MATH_", "SHOP_"))
        ]:
            monkeypatch.delenv(name)
        yield server
        server.shutdown()
        thread.join(timeout=5)
