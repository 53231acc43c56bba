"""`lightningrl run --replay RUN`: commands on real sockets, answered from an earlier run, without a model."""

import asyncio
import itertools
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from lightningrl.cli.recording import calls_of, cassette_at
from lightningrl.cli.run import RunOptions, run_command
from lightningrl.errors import UserError

SCRIPTS = """
import itertools

def script(prompt, messages, tools):
    if messages and messages[-1]["role"] == "tool":
        return f"It is {messages[-1]['content']} °C."
    if tools:
        return {"content": "Let me look.", "tool_calls": [{"name": "weather", "arguments": '{"city":  "Oslo"}'}]}
    return f"echo: {messages[-1]['content']}"

numbers = itertools.count(1)

def counting(prompt, messages, tools):
    return f"answer {next(numbers)}"
"""

OPENAI = """
import openai, sys
client = openai.OpenAI()
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
messages = [{"role": "user", "content": "How warm is it in Oslo?"}]
answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=tools)
print(answer.to_json())
message = answer.choices[0].message
messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": sys.argv[1]}]
for chunk in client.chat.completions.create(model="gpt-5", messages=messages, tools=tools, stream=True):
    print(chunk.to_json())
"""

ANTHROPIC = """
import anthropic
client = anthropic.Anthropic()
messages = [{"role": "user", "content": "Grüße ❄"}]
print(client.messages.count_tokens(model="claude", messages=messages).input_tokens)
print([model.id for model in client.models.list()])
tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
for tools in ([], [tool]):
    with client.messages.stream(model="claude", max_tokens=50, messages=messages, tools=tools) as stream:
        for event in stream:
            print(event.to_json())
"""

ASK = """
import json, os, sys, threading, urllib.error, urllib.request

def post(path, body, **headers):
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        return urllib.request.urlopen(request, timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {dict(error.headers).get('x-should-retry')} {error.read().decode()}"

def chat(*texts, **headers):
    roles = ["user", "assistant"]
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return post("/chat/completions", {"model": "m", "messages": messages}, **headers)
"""


ONE = ASK + "chat('one'); chat('two'); chat('two'); print(chat('three'))"


@dataclass(frozen=True)
class Done:
    """One run of a command."""

    code: int
    printed: str
    report: dict[str, Any]
    said: str
    """What LightningRL printed."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Of recorded, played back, never asked and unknown calls."""
        report = self.report
        return report["recorded"], report["played_back"], report["never_asked"], len(report["unknown"])


@dataclass(frozen=True)
class Place:
    """A folder to run in."""

    folder: Path

    def run(self, command: tuple[str, ...], *options: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "lightningrl", "run", "--json", *options, "--", *command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        printed, brace, report = done.stdout.rpartition("\n{")
        assert brace, done.stderr
        return Done(code=done.returncode, printed=printed, report=json.loads("{" + report), said=done.stderr)

    def record(self, *command: str, engine: str = "script", run: str = "first") -> Done:
        """Run a command with a script in place of the model."""
        done = self.run(command, "--engine", f"scripts:{engine}", "--run-dir", run)
        assert done.code == 0, done.said
        return done

    def replay(self, *command: str, run: str = "first") -> Done:
        return self.run(command, "--replay", run)


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def place_in(folder: Path) -> Place:
    (folder / "scripts.py").write_text(SCRIPTS)
    return Place(folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_in(tmp_path)


@pytest.fixture(scope="module")
def weather(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, Done]:
    """A recording of OpenAI's SDK, `first`, whose script is gone; and of plain requests, `one`."""
    place = place_in(tmp_path_factory.mktemp("weather"))
    done = place.record(*python(OPENAI, "21"))
    place.record(*python(ONE), run="one")
    (place.folder / "scripts.py").unlink()
    return place, done


def test_openai_s_sdk_gets_the_recorded_answers_with_their_ids(weather: tuple[Place, Done]) -> None:
    place, first = weather
    again = place.replay(*python(OPENAI, "21"))
    assert again.printed == first.printed and len(first.printed.splitlines()) > 100
    assert again.code == 0 and again.counts == (2, 2, 0, 0)
    assert again.report["dialects"] == {"openai.chat": 2} and again.report["errors"] == {}


def test_a_stream_of_anthropic_s_sdk_comes_event_by_event_as_recorded(place: Place) -> None:
    first, again = place.record(*python(ANTHROPIC)), place.replay(*python(ANTHROPIC))
    assert again.printed == first.printed and again.printed.count('"content_block_delta"') > 5
    assert '{\\"city\\":  \\"Oslo\\"}' in again.printed  # arguments come with their white space
    assert again.code == 0 and again.counts == (2, 2, 0, 0)


def test_a_plain_http_client_gets_the_same_bytes(place: Place) -> None:
    ask = ASK + "print(chat('hi'), post('/completions', {'model': 'm', 'prompt': 'once', 'n': 2}))"
    first, again = place.record(*python(ask), engine="counting"), place.replay(*python(ask))
    assert again.printed == first.printed and "answer 3" in again.printed
    assert again.code == 0 and again.counts == (3, 3, 0, 0)


def test_a_request_that_was_not_recorded_is_refused_with_the_difference(weather: tuple[Place, Done]) -> None:
    place, _ = weather
    catching = OPENAI.replace("for chunk", "try:\n  for chunk").replace(
        "    print(chunk.to_json())", "    pass\nexcept openai.ConflictError as error:\n  print(error.code)"
    )
    again = place.replay(*python(catching, "22"))
    assert again.printed.endswith("replay_differs\n")
    assert (again.report["exit_code"], again.code) == (0, 1) and again.counts == (2, 1, 1, 1)
    assert again.report["unknown"] == ['message 3 (tool) has "22" instead of "21" (call 2)']
    assert again.report["errors"] == {"409 replay_differs": 1}  # the SDK did not try again
    assert again.said.count("message 3 (tool) has") == 1 and "replay_differs" not in again.said
    assert "1 of 2 recorded calls" in again.said and "1 request that was not recorded" in again.said


def test_the_exit_code_of_a_command_that_fails_stays_its_own(weather: tuple[Place, Done]) -> None:
    again = weather[0].replay(*python(ASK + "chat('ho'); sys.exit(3)"), run="one")
    assert (again.report["exit_code"], again.code) == (3, 3)


def test_recorded_calls_that_are_never_asked_for_are_counted(weather: tuple[Place, Done]) -> None:
    again = weather[0].replay(*python(ASK + "chat('two')"), run="one")
    assert again.code == 0 and again.counts == (4, 1, 3, 0)
    assert "1 of 4 recorded calls" in again.said and "never asked  3" in again.said


def test_the_same_request_gets_its_answers_in_their_order_and_no_further_one(place: Place) -> None:
    ask = ASK + "for _ in range(int(sys.argv[1])): print(chat('hi'))"
    first, again = place.record(*python(ask, "2"), engine="counting"), place.replay(*python(ask, "3"))
    one, two, three = again.printed.splitlines()
    assert [one, two] == first.printed.splitlines() and "answer 1" in one and "answer 2" in two
    assert three.startswith("409 false") and "not on the recording; record again" in three
    assert again.code == 1 and again.counts == (2, 2, 0, 1)


def test_two_parallel_sessions_are_answered_from_one_recording(place: Place) -> None:
    ask = """
def talk(name):
    session = {"x-session-id": name}
    first = chat(f"I am {name}", **session)
    found[name] = first, chat(f"I am {name}", json.loads(first)["choices"][0]["message"]["content"], "again", **session)

found = {}
threads = [threading.Thread(target=talk, args=(name,)) for name in ("ann", "ben")]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(sorted(found.items())))
"""
    first, again = place.record(*python(ASK + ask)), place.replay(*python(ASK + ask))
    assert again.printed == first.printed and "echo: again" in again.printed
    assert again.code == 0 and again.counts == (4, 4, 0, 0) and again.report["attempts"] == 3


def test_neither_upstreams_nor_embeddings_are_asked(weather: tuple[Place, Done], tmp_path: Path) -> None:
    """The recording names an upstream whose server and key are gone."""
    place = weather[0]
    shutil.copytree(place.folder / "one", tmp_path / "one")
    settings = tmp_path / "one" / "recording.toml"
    upstream = {"url": "http://127.0.0.1:9/v1", "key_env": "KEY_OF_NOBODY"}
    tree = tomllib.loads(settings.read_text())
    tree |= {"routes": [{"policy": "upstreams.gone"}], "upstreams": {"gone": upstream}}
    settings.write_text(tomli_w.dumps(tree))
    embed = "print(chat('two')); print(post('/embeddings', {'model': 'm', 'input': 'hi'}))"
    again = place.replay(*python(ASK + embed), run=str(tmp_path / "one"))
    answer, refused = again.printed.splitlines()
    assert "echo: two" in answer and refused.startswith("404 false") and "embeddings are not recorded" in refused
    assert again.code == 0 and again.counts == (4, 1, 3, 0)


EVENTS = (b'data: {"delta": "so"}\n\n', b'data: {"delta": "\xc3\xa9"}\n\n', b"data: [DONE]\n\n")


class Vendor(BaseHTTPRequestHandler):
    """Another server. Its answers are numbered."""

    asked = itertools.count(1)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        streams = bool(body.get("stream"))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streams else "application/json")
        self.end_headers()
        number = next(self.asked)
        for piece in EVENTS if streams else [b'{"id":"x-%d","choices":[],"odd":1.5}' % number]:
            self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def vendor() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vendor)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_answers_of_another_server_are_recorded_and_played_back_without_it(
    place: Place, vendor: ThreadingHTTPServer
) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    asked = f"""
print(chat("hi"), chat("hi"))
print(post("/chat/completions", {{"model": "m", "messages": {picture}}}))
print(post("/chat/completions", {{"model": "m", "messages": [{{"role": "user", "content": "é"}}], "stream": True}}))
"""
    upstream = f'upstreams.real.url="http://127.0.0.1:{vendor.server_port}"'
    options = ("--set", upstream, "--route", "policy=upstreams.real", "--run-dir", "first")
    first = place.run(python(ASK + asked), *options)
    assert first.code == 0 and first.report["upstream"] == 4, first.said
    vendor.server_close()
    again = place.replay(*python(ASK + asked + "print(chat('ho'))"))
    *same, refused = again.printed.splitlines()
    assert same == first.printed.splitlines() and "x-3" in again.printed and '"delta": "é"' in again.printed
    assert refused.startswith("409 false") and again.code == 1 and again.counts == (4, 4, 0, 1)


def test_a_replay_is_a_recording_too(weather: tuple[Place, Done]) -> None:
    place, first = weather
    place.run(python(OPENAI, "21"), "--replay", "first", "--run-dir", "second")
    again = place.replay(*python(OPENAI, "21"), run="second")
    assert again.printed == first.printed and again.counts == (2, 2, 0, 0)


def test_the_settings_to_commit_have_neither_the_command_nor_its_folder(weather: tuple[Place, Done]) -> None:
    folder = weather[0].folder / "one"
    kept = tomllib.loads((folder / "recording.toml").read_text())
    assert kept["agent"]["command"] == ["CMD"] and "root" not in kept and str(folder) not in str(kept)


def test_a_call_that_a_branch_has_played_back_is_there_once(weather: tuple[Place, Done], tmp_path: Path) -> None:
    shutil.copytree(weather[0].folder / "one", tmp_path / "one")
    with closing(sqlite3.connect(tmp_path / "one" / "store.sqlite")) as database, database:
        last = "(select max(rowid) from calls)"
        database.execute(f"update calls set replays = 'chatcmpl-run.1-0' where rowid = {last}")
        database.execute("""update rollouts set branch = '["run.1","chatcmpl-run.1-0"]'""")
    calls = asyncio.run(calls_of(cassette_at(tmp_path / "one")))
    assert [call.id for call in calls] == [f"chatcmpl-run.1-{index}" for index in range(3)]


def options(replay: Path, **named: Any) -> RunOptions:
    nothing: dict[str, Any] = {"engine": None, "model": None, "urls": [], "recipe": None, "overrides": [], "routes": []}
    return RunOptions(**{**nothing, "run_dir": None, **named}, replay=replay)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--engine", {"engine": "scripts:script"}),
        ("--model", {"model": "m"}),
        ("--url", {"urls": ["http://localhost:1"]}),
        ("--recipe", {"recipe": Path("recipe.toml")}),
        ("--set", {"overrides": ["seed=1"]}),
        ("--route", {"routes": ["policy=frozen"]}),
    ],
)
def test_replay_takes_no_option_that_names_a_model(option: str, named: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"`{option}` has no effect") as error:
        run_command(["true"], options(Path("first"), **named))
    assert f"leave out `{option}`" in (error.value.hint or "")


def refused(folder: Path) -> str:
    """The message and the hint for a recording that cannot be played back."""
    with pytest.raises(UserError) as error:
        run_command(["true"], options(folder, run_dir=folder / "again"))
    assert not (folder / "again").exists(), "a refusal leaves nothing behind"
    return f"{error.value.message}; {error.value.hint}"


def test_recordings_that_cannot_be_read_are_explained(weather: tuple[Place, Done], tmp_path: Path) -> None:
    folder = tmp_path / "one"
    assert "no records at" in refused(folder)
    shutil.copytree(weather[0].folder / "one", folder)
    settings = (folder / "recording.toml").read_text()
    (folder / "recording.toml").write_text(settings.replace("chat/plain", "chat/gone"))
    assert "the tokenizer of" in refused(folder) and "chat_template.jinja" in refused(folder)
    (folder / "recording.toml").write_text("[")
    assert "cannot read" in refused(folder)
    (folder / "recording.toml").unlink()
    assert "no recording.toml" in refused(folder) and "record it again" in refused(folder)


def test_a_store_of_a_later_version_is_refused(weather: tuple[Place, Done], tmp_path: Path) -> None:
    shutil.copytree(weather[0].folder / "one", tmp_path / "one")
    with closing(sqlite3.connect(tmp_path / "one" / "store.sqlite")) as database:
        (version,) = database.execute("pragma user_version").fetchone()
        database.execute(f"pragma user_version = {version + 1}")
    assert f"the store has schema `{version + 1}`" in refused(tmp_path / "one")


def test_a_recording_without_a_call_has_no_answer(place: Place) -> None:
    place.record("true")
    assert "no complete call" in refused(place.folder / "first")
