"""The agent is plain AutoGen with a real MCP server. If the server dies, the attempt fails; the next gets a new one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")
TASK = {
    "question": "ann has 37 eggs\nann swaps each for 48\nben has 5 fewer than ann\nhow many eggs has ben",
    "answer": "1771",
}


def wish(*expressions: str) -> dict[str, Any]:
    function = [
        {"name": "calculator", "arguments": json.dumps({"expression": expression})} for expression in expressions
    ]
    return {
        "tool_calls": [{"id": f"call_{place}", "type": "function", "function": f} for place, f in enumerate(function)]
    }


def results(asked: dict[str, Any]) -> list[str]:
    return [message["content"] for message in asked["messages"] if message["role"] == "tool"]


def servers() -> list[int]:
    """Ids of the calculator processes that this process has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children if b"calculator.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest_asyncio.fixture(loop_scope="module", scope="module", autouse=True)
async def closing(math: Any) -> AsyncIterator[None]:
    yield
    await math.workbench.close()
    assert not servers()


@pytest_asyncio.fixture(loop_scope="module")
async def scripted(math: Any, server: Any) -> AsyncIterator[Any]:
    """The scripted server; its connections are closed at the end."""
    yield server
    await math.agent.client("math", os.environ["OPENAI_BASE_URL"], "attempt-token").close()
    math.agent.client.cache_clear()


async def test_an_answer_is_what_the_calculator_worked_out(math: Any, scripted: Any) -> None:
    scripted.answers = [wish("37 * 48"), wish("1776 - 5"), "1771"]
    output = await math.agent.run(TASK)
    assert output == {"answer": "1771", "calls": ['{"expression": "37 * 48"}', '{"expression": "1776 - 5"}']}
    assert math.tasks.reward(TASK, output) == 1.0
    assert [results(asked) for asked in scripted.asked] == [[], ["1776"], ["1776", "1771"]]
    for before, after in zip(scripted.asked, scripted.asked[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]


async def test_the_model_is_shown_the_tools_that_demonstrations_are_rendered_with(math: Any, scripted: Any) -> None:
    scripted.answers = ["1771"]
    await math.agent.run(TASK)
    assert scripted.asked[0]["tools"] == math.demonstrations.TOOLS


async def test_after_its_last_round_the_agent_reflects_without_tools(
    math: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATH_TOOL_ITERATIONS", "2")
    scripted.answers = [wish("37 * 48"), wish("1776 - 5"), "1771"]
    assert (await math.agent.run(TASK))["answer"] == "1771"
    assert ["tools" in asked for asked in scripted.asked] == [True, True, False]


async def test_a_call_that_cannot_be_worked_out_is_answered_and_the_server_lives_on(math: Any, scripted: Any) -> None:
    function = {"name": "calculator", "arguments": '{"sum": "1"}'}
    unfit = {"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    unread = {"tool_calls": [{"id": "call_0", "type": "function", "function": {**function, "arguments": "{37"}}]}
    scripted.answers = [wish("37 *"), unfit, unread, "5"]
    assert (await math.agent.run(TASK))["answer"] == "5"
    first, second, third = results(scripted.asked[-1])
    assert first == "error: not an expression" and "Field required" in second and third.startswith("Error")
    assert len(servers()) == 1


async def test_agents_that_run_at_once_share_one_server(
    math: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATH_TOOL_ITERATIONS", "9")
    scripted.answers = [wish("1 + 1", "2 + 2")] * 8 + ["4"] * 8
    outputs = await asyncio.gather(*(math.agent.run(TASK) for _ in range(8)))
    assert [output["answer"] for output in outputs] == ["4"] * 8
    assert sum(len(output["calls"]) for output in outputs) == 16
    assert {tuple(results(asked)[:2]) for asked in scripted.asked} <= {(), ("2", "4")}
    assert len(servers()) == 1


async def test_when_the_server_dies_during_a_call_its_agents_fail_and_the_next_gets_another(
    math: Any, scripted: Any
) -> None:
    scripted.answers = [wish("1 + 1")] * 2 + ["2"] * 2
    await math.workbench.shared()
    (server,) = servers()
    os.kill(server, signal.SIGSTOP)
    attempts = [asyncio.create_task(math.agent.run(TASK)) for _ in range(2)]
    while len(scripted.asked) < 2:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    os.kill(server, signal.SIGKILL)
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        assert isinstance(outcome, math.workbench.CalculatorFailed) and "Connection closed" in str(outcome)
    scripted.answers = [wish("1 + 2"), "3"]
    assert (await math.agent.run(TASK))["answer"] == "3"
    assert results(scripted.asked[-1]) == ["3"] and server not in servers()


async def test_a_server_that_dies_between_two_calls_is_no_reward_of_0_either(math: Any, scripted: Any) -> None:
    await math.workbench.shared()
    for server in servers():
        os.kill(server, signal.SIGKILL)
    scripted.answers = [wish("1 + 1"), "0"]
    with pytest.raises(math.workbench.CalculatorFailed):
        await math.agent.run(TASK)


async def test_a_demonstration_is_what_the_agent_would_have_recorded(math: Any, scripted: Any) -> None:
    shown = math.demonstrations.demonstrations(seed=1, count=60)
    for demonstration in [*shown[:3], next(d for d in shown if d.reflects)]:
        scripted.answers = [dict(message) for message in demonstration.messages if message["role"] == "assistant"]
        scripted.asked = []
        output = await math.agent.run(math.tasks.as_task(demonstration.problem, "x")["input"])
        assert output["answer"] == demonstration.answer
        heard = [
            {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
            for message in scripted.asked[-1]["messages"]
        ]
        said = [
            {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
            for message in demonstration.messages[:-1]
        ]
        assert heard == said
        assert ("tools" not in scripted.asked[-1]) == demonstration.reflects


async def test_the_agent_is_also_a_program_and_takes_its_server_with_it(math: Any, server: Any) -> None:
    server.answers = [wish("37 * 48 - 5"), "1771"]

    def call() -> str:
        command = [sys.executable, "agent.py"]
        return subprocess.run(
            command, cwd=math.folder, input=json.dumps(TASK), capture_output=True, text=True, timeout=100, check=True
        ).stdout

    assert json.loads(await asyncio.to_thread(call)) == {"answer": "1771", "calls": ['{"expression": "37 * 48 - 5"}']}
