"""The assistant as a node process with Vercel's AI SDK, with a scripted server on a real socket."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HINT = "install Node.js 20 or newer with npm, then `make test-recipes`"
TASK = {
    "question": "ben asks: price of what ann returned",
    "records": {
        "ann returned": "blue lamp",
        "ben returned": "green book",
        "blue lamp shelf": "31",
        "blue lamp price": "14",
    },
    "answer": "14",
}


@pytest.fixture(autouse=True, scope="module")
def installed(shop: Any) -> None:
    if not (shop.folder / "node_modules" / ".ready").exists():
        pytest.fail(f"the packages of `{shop.folder}` are missing\nhint: {HINT}", pytrace=False)


def answered(shop: Any, task: Any) -> Any:
    """The agent's output for a task."""
    done = subprocess.run(
        ["node", "agent.mjs"],
        cwd=shop.folder,
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wish(name: object, *, place: int = 0, tool: str = "look_up") -> dict[str, Any]:
    arguments = name if isinstance(name, str) and name.startswith("{") else json.dumps({"name": name})
    return {
        "content": None,
        "tool_calls": [{"id": f"call_{place}", "type": "function", "function": {"name": tool, "arguments": arguments}}],
    }


def told(server: Any) -> list[str]:
    """The tool's results."""
    return [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "tool"]


def test_two_records_are_read_and_the_number_is_the_answer(shop: Any, server: Any) -> None:
    server.answers = [wish("ann returned"), wish("blue lamp price", place=1), "14"]
    output = answered(shop, TASK)
    assert output == {"answer": "14"}
    assert shop.tasks.reward(TASK, output) == 1.0
    assert told(server) == ["blue lamp", "14"]
    assert server.keys == ["Bearer attempt-token"] * 3
    assert {request["model"] for request in server.asked} == {"assistant"}
    for before, after in zip(server.asked, server.asked[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]


def test_a_missing_record_is_reported_to_the_model(shop: Any, server: Any) -> None:
    server.answers = [wish("eva"), wish("toString", place=1), "no idea"]
    assert answered(shop, TASK) == {"answer": "no idea"}
    assert told(server) == ["no record of eva", "no record of toString"]


def test_a_malformed_call_is_reported_to_the_model(shop: Any, server: Any) -> None:
    server.answers = [wish(3), wish('{"name": ', place=1), wish("ann", place=2, tool="find"), "14"]
    assert answered(shop, TASK) == {"answer": "14"}
    assert [message.startswith('{"error":') for message in told(server)] == [True] * 3


def test_an_agent_that_never_stops_looking_up_has_no_answer(
    shop: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [wish("ann", place=place) for place in range(9)]
    server.answers = [*script]
    assert answered(shop, TASK) == {"answer": ""}
    assert len(server.asked) == 4
    monkeypatch.setenv("SHOP_MAX_STEPS", "2")
    server.answers, server.asked = [*script], []
    assert answered(shop, TASK) == {"answer": ""}
    assert len(server.asked) == 2


def test_the_model_name_comes_from_the_environment(shop: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_MODEL", "gpt-4o-mini")
    server.answers = ["14"]
    answered(shop, TASK)
    assert server.asked[0]["model"] == "gpt-4o-mini"


def test_the_gateway_renders_a_conversation_as_the_warm_start_has_shown_it(
    shop: Any, server: Any, tmp_path: Path
) -> None:
    from lightningrl.chat import ChatTemplate
    from lightningrl.dialects.base import Past
    from lightningrl.dialects.openai_chat import OpenAIChat
    from lightningrl.warmstart.demonstrations import answers_of
    from lightningrl.warmstart.examples import examples_of

    shown = shop.demonstrations.demonstrations(seed=1, count=200)
    tokenizer = shop.warmstart.tokenizer_for([])
    tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate.load(tmp_path)
    for demonstration in shown[:3]:
        server.answers = [dict(message) for message in demonstration.messages if message["role"] == "assistant"]
        server.asked = []
        answered(shop, shop.tasks.as_task(demonstration.problem, "x")["input"])
        asked = OpenAIChat().parse(server.asked[0], Past())
        ids = template.render(asked.messages, tools=asked.tools)
        answers = answers_of({"messages": demonstration.messages, "tools": shop.demonstrations.TOOLS})
        [[first, *_]] = examples_of([answers], template, max_length=512)
        assert list(first.prompt_ids) == ids
        assert told(server) == [message["content"] for message in demonstration.messages if message["role"] == "tool"]


def test_a_run_of_the_program_is_captured_whole(shop: Any, tmp_path: Path) -> None:
    (tmp_path / "scripts.py").write_text(
        "def script(prompt, messages, tools):\n"
        "    names = ['ann returned', 'blue lamp price']\n"
        "    read = sum(message['role'] == 'tool' for message in messages)\n"
        "    return {'tool_calls': [{'name': 'look_up', 'arguments': {'name': names[read]}}]} if read < 2 else '14'\n"
    )
    ours = [
        sys.executable,
        "-m",
        "lightningrl",
        "run",
        "--engine",
        "scripts:script",
        "--json",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        [*ours, "--", "node", "agent.mjs"],
        cwd=shop.folder,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        input=json.dumps(TASK),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed, *_ = done.stdout.splitlines()
    assert json.loads(printed) == {"answer": "14"}
    calls = asyncio.run(calls_of(tmp_path / "run" / "store.sqlite"))
    assert [call.capture for call in calls] == ["rendered", "bridged", "bridged"]
    assert {call.agent for call in calls} == {"assistant"}


async def calls_of(path: Path) -> list[Any]:
    from lightningrl.store import open_store

    store = await open_store(f"sqlite://{path}")
    try:
        rollouts = await store.rollouts()
        return await store.calls([attempt.id for attempt in await store.attempts([rollout.id for rollout in rollouts])])
    finally:
        await store.close()


def test_the_recipe_runs_with_the_packages_that_the_gateway_is_tested_with(shop: Any) -> None:
    ours = json.loads((shop.folder / "package.json").read_text())["dependencies"]
    tested = json.loads((Path(__file__).parents[1] / "tests/matrix/node/package.json").read_text())["dependencies"]
    pinned = {
        name.replace("-7", ""): version.rpartition("@")[2] for name, version in tested.items() if "-6" not in name
    }
    assert ours == {name: pinned[name] for name in ours}
