"""`lightningrl eval`: two models and a server on the same held-out tasks."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.conftest import SmallRecipe


@dataclass
class Foreign:
    """A server with a constant answer."""

    url: str
    said: str = "red!"
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(model, key) of each request."""


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.asked.append((body["model"], self.headers["authorization"]))
            message = {"role": "assistant", "content": found.said}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
            answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Foreign(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_and_a_server_are_measured_on_the_same_tasks(
    small_recipe: SmallRecipe, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREIGN_KEY", "secret")
    against = ("--against", f"{foreign.url}#big", "--key-env", "FOREIGN_KEY", "--against", "model")
    done = small_recipe.cli("eval", str(small_recipe.path), *against, "--json", "tasks.heldout=4")
    assert done.returncode == 0, done.stderr
    own = json.loads(done.stdout.splitlines()[-1])
    other, same = own["against"]
    assert set(foreign.asked) == {("big", "Bearer secret")} and len(foreign.asked) == 2 * 4
    assert other["heldout"] == len("red!") % 5 / 4 and other["heldout_greedy"] is None and other["tasks"] == 4
    difference = other["difference"]["sampled"]
    assert difference["mean"] == pytest.approx(other["heldout"] - own["heldout"]) and difference["tasks"] == 4
    assert difference["low"] <= difference["mean"] <= difference["high"] and 0 < difference["p"] <= 1
    assert same["heldout"] == own["heldout"] and same["difference"]["greedy"] == {
        "mean": 0,
        "low": 0,
        "high": 0,
        "p": 1,
        "tasks": 4,
    }
    low, high = own["heldout_interval"]
    assert low <= own["heldout"] <= high
    assert "as it answers" in done.stderr and f"{foreign.url}#big" in done.stderr


def test_a_server_is_measured_without_a_local_model(small_recipe: SmallRecipe, foreign: Foreign) -> None:
    (small_recipe.folder / "model").unlink()
    done = small_recipe.cli(
        "eval", str(small_recipe.path), "--checkpoint", f"{foreign.url}#big", "--key-env", "", "--json"
    )
    assert done.returncode == 0, done.stderr
    score = json.loads(done.stdout.splitlines()[-1])
    assert score["heldout"] == 1.0 and "against" not in score


def test_a_missing_key_is_reported(
    small_recipe: SmallRecipe, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREIGN_KEY", raising=False)
    done = small_recipe.cli("eval", str(small_recipe.path), "--checkpoint", foreign.url, "--key-env", "FOREIGN_KEY")
    assert done.returncode == 2 and "FOREIGN_KEY" in done.stderr and not foreign.asked
