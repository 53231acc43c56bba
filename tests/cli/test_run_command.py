"""`lightningrl run`: real commands, signals and a terminal, with a script in place of the model."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat.reasons import HISTORY_REWRITTEN
from tests.conftest import SmallRecipe

SCRIPTS = """
import sys

def script(prompt, messages, tools):
    assert "torch" not in sys.modules, "a script needs no torch"
    if messages and messages[-1]["role"] == "tool":
        return "It is 21 °C."
    if tools:
        return {"content": "Let me look.", "tool_calls": [{"name": "weather", "arguments": '{"city":  "Oslo"}'}]}
    return "hello"

def broken(prompt, messages, tools):
    raise ValueError("no luck today")
"""

AGENT = """
import openai
client = openai.OpenAI()
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
messages = [{"role": "user", "content": "How warm is it in Oslo?"}]
answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=tools).choices[0].message
(call,) = answer.tool_calls
assert call.function.arguments == '{"city":  "Oslo"}'
messages += [answer, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=tools, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in answer), end="")
"""

ASK = """
import json, os, sys, urllib.error, urllib.request

def ask(url, body, **headers):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        return json.load(urllib.request.urlopen(request, timeout=20))
    except urllib.error.HTTPError as error:
        return error.code

def chat(*texts, model="m", **headers):
    roles = ["user", "assistant"]
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    body = {"model": model, "max_tokens": 20, "messages": messages}
    answer = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, **headers)
    return answer if isinstance(answer, int) else answer["choices"][0]["message"]["content"]

key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
"""


@dataclass(frozen=True)
class Place:
    """A folder to run in."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "lightningrl", "run", *arguments]

    def run(self, *arguments: str, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )

    def captured(self, *command: str, engine: str = "scripts:script", options: tuple[str, ...] = ()) -> dict[str, Any]:
        done = self.run("--engine", engine, "--json", *options, "--", *command)
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def ask(self, code: str, **options: Any) -> dict[str, Any]:
        """The result of a program that sends plain HTTP requests."""
        return self.captured(sys.executable, "-c", ASK + code, **options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "scripts.py").write_text(SCRIPTS)
    (tmp_path / "agent.py").write_text(AGENT)
    return Place(tmp_path)


def gone(pid: int) -> bool:
    """Whether a process has ended, within five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_an_agent_is_captured_token_by_token(place: Place) -> None:
    done = place.run("--engine", "scripts:script", "--json", "--", sys.executable, "agent.py")
    assert done.returncode == 0, done.stderr
    answer, last = done.stdout.splitlines()
    assert answer == "It is 21 °C."
    found = json.loads(last)
    expected = {
        "exit_code": 0,
        "calls": 2,
        "bridged": 1,
        "rendered": 1,
        "forked": 0,
        "incomplete": 0,
        "upstream": 0,
        "fork_reasons": {},
        "errors": {},
        "dialects": {"openai.chat": 2},
        "agents": {"gpt-5": 2},
        "attempts": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["sampled_tokens"] > 20 and found["prompt_tokens"] > found["reused_tokens"] > found["sampled_tokens"]
    assert Path(found["store"]).is_file() and Path(found["store"]).is_relative_to(place.folder / "runs")
    assert "captured" in done.stderr and "1 bridged · 1 rendered" in done.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "lightningrl", "rollouts", found["store"], "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (rollout,) = json.loads(listed.stdout.splitlines()[-1])["rollouts"]
    assert (rollout["status"], rollout["calls"], rollout["sampled_tokens"]) == ("succeeded", 2, found["sampled_tokens"])


def test_every_dialect_is_served(place: Place) -> None:
    found = place.ask("""
assert chat("hi", **key) == "hello"
body = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
said = ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, **{"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
assert said["content"][0]["text"] == "hello", said
url = os.environ["GOOGLE_GEMINI_BASE_URL"] + "/v1beta/models/gemini:generateContent"
body = {"contents": [{"parts": [{"text": "hi"}]}]}
said = ask(url, body, **{"x-goog-api-key": os.environ["GEMINI_API_KEY"]})
assert said["candidates"][0]["content"]["parts"][0]["text"] == "hello", said
said = ask(os.environ["OPENAI_BASE_URL"] + "/responses", {"model": "m", "input": "hi"}, **key)
assert said["output"][0]["content"][0]["text"] == "hello", said
said = ask(os.environ["OPENAI_BASE_URL"] + "/completions", {"model": "m", "prompt": "hi"}, **key)
assert said["choices"][0]["text"] == "hello", said
""")
    assert found["exit_code"] == 0
    spoken = ("openai.chat", "anthropic.messages", "google.gemini", "openai.responses", "openai.completions")
    assert found["dialects"] == dict.fromkeys(spoken, 1)
    assert found["calls"] == found["rendered"] == 5


def test_rewritten_history_is_reported_with_the_reason(place: Place) -> None:
    found = place.ask(
        'chat("hi", **key); chat("hi", "hello", "go on", **key); chat("hi", "something else", "go on", **key)'
    )
    assert (found["rendered"], found["bridged"], found["forked"]) == (1, 1, 1)
    ((why, times),) = found["fork_reasons"].items()
    assert why and times == 1


def test_partly_bridged_calls_are_reported_with_the_reason(place: Place) -> None:
    asked = 'chat("a", **key); chat("a", "hello", "b", **key); chat("a", "hello", "cleared", "hello", "c", **key)'
    found = place.ask(f'{asked}; chat("a", "hello", "cleared", "hello", "c", "hello", "d", **key)')
    assert [found[capture] for capture in ("rendered", "bridged", "partly", "forked")] == [1, 2, 1, 0]
    assert found["partly_reasons"] == {HISTORY_REWRITTEN: 1}
    report = subprocess.run(
        [sys.executable, "-m", "lightningrl", "rollouts", found["store"], "--report"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "partly" in report.stdout and "later answers" in report.stdout


def test_refusals_and_broken_answers_are_counted(place: Place) -> None:
    found = place.ask(
        'assert chat("hi", **key) == 500; assert ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {}) == 400',
        engine="scripts:broken",
    )
    assert found["exit_code"] == 0 and sum(found["errors"].values()) == 2, found["errors"]
    assert {said.split()[0] for said in found["errors"]} == {"400", "500"}
    assert any("no luck today" in told for told in found["complaints"].values())
    assert (found["calls"], found["incomplete"]) == (1, 1)
    ((why, _),) = found["incomplete_reasons"].items()
    assert why == "script `scripts:broken` raised `ValueError`: no luck today"


def test_callers_without_a_key_get_an_attempt_for_each_session(place: Place) -> None:
    found = place.ask("""
chat("hi", **key)
chat("hi", authorization="Bearer made-up")
chat("hi", **{"x-session-id": "one"})
chat("hi", "hello", "go on", **{"x-session-id": "one"})
chat("hi", **{"x-session-id": "two"})
""")
    assert (found["calls"], found["attempts"], found["bridged"], found["errors"]) == (5, 3, 1, {})


def test_the_command_gets_stdin_stdout_and_stderr(place: Place) -> None:
    done = place.run(
        "--engine", "scripts:script", "--", "sh", "-c", "cat; echo to stderr >&2; exit 7", input="in and out ü"
    )
    assert done.returncode == 7 and done.stdout == "in and out ü" and "to stderr" in done.stderr
    assert "it never called the model" in done.stderr


def test_settings_may_come_from_a_recipe(place: Place, small_recipe: SmallRecipe) -> None:
    small_recipe.path.write_text(
        small_recipe.path.read_text().replace("[tasks]", 'env = {FLAVOUR = "mint"}\n[tasks]')
        + '\n[[routes]]\nagent = "writer"\n'
    )
    found = place.ask(
        'assert os.environ["FLAVOUR"] == "mint" and chat("say", **key) == "hello"',
        options=("--recipe", str(small_recipe.folder)),
    )
    assert found["exit_code"] == 0 and found["agents"] == {"writer": 1}


def test_options_after_the_command_belong_to_the_command(place: Place) -> None:
    done = place.run("--engine", "scripts:script", "echo", "--json", "--engine", "x")
    assert done.stdout == "--json --engine x\n"


def test_the_environment_points_to_the_gateway_alone(place: Place) -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    env = {
        **os.environ,
        "OPENAI_BASE_URL": "https://elsewhere",
        "ANTHROPIC_AUTH_TOKEN": "mine",
        "JUDGE_KEY": "sk-judge",
        "DATABASE_URL": "db",
    }
    judge = "upstreams.judge={url='http://127.0.0.1:9/v1', key_env='JUDGE_KEY'}"
    done = place.run("--engine", "scripts:script", "--set", judge, "--", sys.executable, "-c", program, env=env)
    found = json.loads(done.stdout)
    gateway = found["ANTHROPIC_BASE_URL"]
    assert (
        gateway.startswith("http://127.0.0.1:")
        and found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == f"{gateway}/v1"
    )
    assert found["OPENAI_API_KEY"] == found["GEMINI_API_KEY"] and "ANTHROPIC_AUTH_TOKEN" not in found
    assert gateway in (Path(found["CODEX_HOME"]) / "config.toml").read_text()
    assert found["PATH"] == env["PATH"], "`python` stays what it was"
    assert found["DATABASE_URL"] == "db" and "sk-judge" not in found.values(), (
        "all of the shell's environment but for the key of an upstream"
    )


def test_a_signal_reaches_the_command_and_its_exit_code_is_returned(place: Place) -> None:
    for number, code in ((signal.SIGTERM, 33), (signal.SIGINT, 32)):
        polite = "trap 'exit 33' TERM; trap 'exit 32' INT; echo ready; while :; do sleep 0.05; done"
        running = subprocess.Popen(
            place.command("--engine", "scripts:script", "--", "sh", "-c", polite),
            cwd=place.folder,
            stdout=subprocess.PIPE,
        )
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        running.send_signal(number)
        running.communicate(timeout=20)
        assert running.returncode == code


def test_child_processes_of_a_command_are_ended_with_it(place: Place) -> None:
    ignores = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(300)"
    stubborn = f"{sys.executable} -c '{ignores}'"
    done = place.run(
        "--engine",
        "scripts:script",
        "--",
        "sh",
        "-c",
        f"sleep 300 & echo $!; {stubborn} > up & echo $!; while [ ! -s up ]; do sleep 0.05; done; kill -9 $$",
    )
    assert done.returncode == 128 + 9
    first, second = map(int, done.stdout.split())
    assert gone(first) and gone(second)


TERMINAL = """
import os, pty, subprocess, sys, termios
parent, child = pty.openpty()
def own():
    os.setsid()
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal that is opened becomes the session's
process = subprocess.Popen(sys.argv[1:], stdin=child, stdout=child, stderr=child, preexec_fn=own)
os.close(child)
said = b""
def until(text):
    global said
    while text not in said:
        said += os.read(parent, 1024)
until(b"name?")
os.write(parent, b"Ada\\n")
until(b"hello Ada")
os.write(parent, b"\\x03")
until(b"interrupted")
code = process.wait()
print(code)
"""

TALK = """
import os, signal
def stop(*_):
    print("interrupted", flush=True)
    os._exit(9)
signal.signal(signal.SIGINT, stop)
print("hello", input("name? "), flush=True)
signal.pause()
"""


def test_at_a_terminal_the_command_is_in_the_foreground(place: Place) -> None:
    command = place.command("--engine", "scripts:script", "--", sys.executable, "-c", TALK)
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL, *command],
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "9\n", done.stderr


def test_an_engine_that_is_a_model_answers_too(place: Place, model_folder: Path) -> None:
    options = (
        "--model",
        str(model_folder),
        "--set",
        "engine.max_length=64",
        "--route",
        "model=other,policy=frozen,agent=judge",
        "--run-dir",
        "mine",
    )
    found = place.ask('chat("say", **key); chat("say", model="other", **key)', engine="embedded", options=options)
    assert found["calls"] == 2 and 0 < found["sampled_tokens"] <= 40 and found["agents"] == {"m": 1, "judge": 1}
    assert found["store"] == str(place.folder / "mine" / "store.sqlite")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "true"], "neither `--engine` nor `--model`"),
        (["--engine", "vllm", "--", "true"], "engine `vllm` needs a model"),
        (["--engine", "absent:script", "--", "true"], "no module `absent`"),
        (["--engine", "scripts:absent", "--", "true"], "has no `absent`"),
        (["--engine", "scripts:SCRIPTS", "--", "true"], "is a `str`"),
        (["--engine", "scripts:script", "--", "no-such-program"], "there is no program `no-such-program`"),
        (["--engine", "scripts:script", "--route", "colour=red", "--", "true"], "has no part `colour`"),
        (["--engine", "scripts:script", "--route", "policy=upstreams.judge", "--", "true"], "upstreams.judge"),
        (["--engine", "scripts:script", "--set", "gateway.histroy=exact", "--", "true"], "did you mean `history`?"),
        (["--engine", "scripts:script", "--model", "nowhere/", "--", "true"], "no model folder"),
        (["--engine", "scripts:script", "--run-dir", "used", "--", "true"], "holds a run already"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(place: Place, arguments: list[str], said: str) -> None:
    (place.folder / "used").mkdir()
    (place.folder / "used" / "store.sqlite").touch()
    with (place.folder / "scripts.py").open("a") as file:
        file.write('\nSCRIPTS = ""\n')
    done = place.run(*arguments)
    assert done.returncode == 2 and said in " ".join(done.stderr.split()) and "hint:" in done.stderr, done.stderr


def test_a_vllm_that_cannot_start_is_refused_before_there_is_a_folder(place: Place) -> None:
    done = place.run("--engine", "vllm", "--model", "m", "--set", "engine.python=/bin/false", "--", "true")
    assert done.returncode == 2 and "`/bin/false`, which cannot be run" in " ".join(done.stderr.split()), done.stderr
    assert not (place.folder / "runs").exists()
