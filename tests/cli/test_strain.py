"""`lightningrl run` under load: a caller that asks for too much harms neither other callers nor the machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROBE = """
import http.client, json, os, sys, threading, time
from urllib.parse import urlsplit

server, key = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
LINE = "2026-11-22 05:46:18 INFO worker[7] GET /v1/things?id=7 200 0.013s user=alice\\n"

def connect():
    return http.client.HTTPConnection(server.hostname, server.port, timeout=60)

def ask(connection, text, **headers):
    body = json.dumps({"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": text}]})
    connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}", **headers})
    answer = connection.getresponse()
    answer.read()
    return answer.status

def log_of(size):
    return (LINE * (size // len(LINE) + 1))[:size]

def memory():
    status = open(f"/proc/{os.getppid()}/status").read()  # the gateway's
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024

def tell(**found):
    print(json.dumps(found), flush=True)
"""

LONG_PROMPT = """
size, statuses, waits, connection = int(sys.argv[1]), [], [], connect()
big = threading.Thread(target=lambda: statuses.append(ask(connect(), log_of(size))))
ask(connection, "hi")
big.start()
while big.is_alive():
    began = time.perf_counter()
    assert ask(connection, "hi") == 200
    waits.append(time.perf_counter() - began)
    time.sleep(0.005)
tell(status=statuses[0], longest=max(waits), waits=len(waits))
"""

STRANGERS = """
import socket
ask(connect(), "hi")
before, most = memory(), 0
head = "POST /v1/chat/completions HTTP/1.1\\r\\nhost: %s\\r\\nauthorization: Bearer nobody\\r\\n%s"
head += "content-length: 40000000\\r\\n\\r\\n"
ways = [head % ("10.0.0.1", ""), head % ("localhost", "origin: https://evil.example\\r\\n")]
answers = []

def stranger(way):
    with socket.create_connection((server.hostname, server.port)) as sock:
        sock.sendall(way.encode())
        for _ in range(40):
            sock.sendall(b"x" * 1_000_000)
        answers.append(sock.recv(12).decode())

strangers = [threading.Thread(target=stranger, args=(ways[n % 2],)) for n in range(20)]
for each in strangers:
    each.start()
while any(each.is_alive() for each in strangers):
    most = max(most, memory())
    time.sleep(0.01)
assert ask(connect(), "hi") == 200
tell(answers=sorted(set(answers)), count=len(answers), grown=most - before)
"""

ENDLESS = """
threading.Thread(target=lambda: ask(connect(), log_of(3_000_000)), daemon=True).start()
time.sleep(1)
tell(began=True)
time.sleep(60)
"""


def command(folder: Path, code: str, *arguments: str, max_length: int) -> list[str]:
    (folder / "scripts.py").write_text("def script(prompt, messages, tools):\n    return 'hello'\n")
    (folder / "agent.py").write_text(PROBE + code)
    options = ["--engine", "scripts:script", "--set", f"engine.max_length={max_length}"]
    return [sys.executable, "-m", "lightningrl", "run", *options, "--", sys.executable, "agent.py", *arguments]


def told(folder: Path, code: str, *arguments: str, max_length: int = 1_000_000) -> dict[str, Any]:
    done = subprocess.run(
        command(folder, code, *arguments, max_length=max_length),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[0])


@pytest.mark.parametrize(
    ("size", "max_length", "status"), [(4_000_000, 32_768, 400), (500_000, 1_000_000, 200)], ids=["refused", "fits"]
)
def test_a_long_prompt_does_not_delay_other_callers(tmp_path: Path, size: int, max_length: int, status: int) -> None:
    found = told(tmp_path, LONG_PROMPT, str(size), max_length=max_length)
    assert found["status"] == status
    assert found["longest"] < 1.0, found


def test_callers_without_a_token_cannot_fill_the_memory(tmp_path: Path) -> None:
    found = told(tmp_path, STRANGERS)
    assert (found["answers"], found["count"]) == (["HTTP/1.1 401"], 20)
    assert found["grown"] < 50, found  # MB; their bodies have 800


def test_a_long_prompt_does_not_delay_the_end(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path, ENDLESS, max_length=10_000_000), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline()) == {"began": True}
        began = time.monotonic()
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=30)
        assert time.monotonic() - began < 3
