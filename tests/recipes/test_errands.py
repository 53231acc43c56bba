"""Errands are a pure function of (split, seed); the agent is a plain loop over tool calls; only the end is rewarded, and only for the whole of it."""

import json
import subprocess
import sys
from typing import Any

import pytest

COUNT = 300
TASK = {
    "request": 'send "red lamp" from "attic" to "anna"\nsend "blue cup" from "study" to "ben"',
    "rooms": {"attic": ["blue lamp", "red lamp"], "study": ["blue cup", "green cup"]},
    "wanted": [["anna", "red lamp"], ["ben", "blue cup"]],
}
ERRANDS = [("go", "room", "attic"), ("take", "thing", "red lamp"), ("send", "person", "anna")]
ERRANDS += [("go", "room", "study"), ("take", "thing", "blue cup"), ("send", "person", "ben")]


def wish(tool: str, argument: str, value: str) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps({argument: value})}
    return {"tool_calls": [{"id": f"call_{tool}", "type": "function", "function": function}]}


def test_tasks_follow_from_split_and_seed_alone(errands: Any) -> None:
    first = errands.tasks.tasks("train", seed=3, count=8)
    assert errands.tasks.tasks("train", seed=3, count=12)[:8] == first
    assert errands.tasks.tasks("train", seed=4, count=8) != first
    assert len({row["id"] for row in first}) == 8


def test_no_structure_is_in_both_splits_and_no_heldout_word_is_new(errands: Any) -> None:
    train, heldout = (errands.tasks.problems(split, seed=0, count=COUNT) for split in ("train", "heldout"))
    assert not {errands.tasks.structure(p) for p in train} & {errands.tasks.structure(p) for p in heldout}
    shown = {errands.tasks.structure(d.problem) for d in errands.demonstrations.demonstrations(seed=0, count=COUNT)}
    assert not shown & {errands.tasks.structure(p) for p in heldout}
    assert {word for p in heldout for word in p.request.split()} <= {word for p in train for word in p.request.split()}


def test_two_errands_take_seven_calls_and_earn_one(errands: Any, server: Any) -> None:
    server.answers = [*(wish(*errand) for errand in ERRANDS), "done"]
    output = errands.agent.run(TASK)
    assert output == {"sent": [["anna", "red lamp"], ["ben", "blue cup"]]}
    assert errands.tasks.reward(TASK, output) == 1.0
    assert len(server.asked) == 7
    assert {tool["function"]["name"] for tool in server.asked[0]["tools"]} == {"go", "take", "send"}
    told = [message["content"] for message in server.asked[-1]["messages"] if message["role"] == "tool"]
    assert told[:3] == ['you see "blue lamp", "red lamp"', 'you hold "red lamp"', "sent"]
    for before, after in zip(server.asked, server.asked[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_what_cannot_be_done_is_an_error_and_what_was_not_asked_for_is_not(errands: Any) -> None:
    house = errands.house.House(TASK["rooms"])
    assert house.call("take", {"thing": "red lamp"}) == 'error: there is no "red lamp" here'
    assert house.call("send", {"person": "anna"}) == "error: you hold nothing"
    assert house.call("go", {"room": "moon"}) == "error: there is no moon"
    assert house.call("go", {"room": "cellar"}) == "you see nothing"
    assert house.call("go", {"room": "attic"}) == 'you see "blue lamp", "red lamp"'
    assert house.call("go", {"room": "attic"}) == "error: you are in the attic"
    assert house.call("take", {"thing": "blue lamp"}) == 'you hold "blue lamp"'
    assert house.call("take", {"thing": "red lamp"}) == 'error: you hold "blue lamp"'
    assert house.call("send", {"person": "nobody"}) == "error: there is no nobody"
    assert house.call("send", {"person": "ben"}) == "sent"
    assert house.call("fly", {}) == house.call("go", {"thing": 1}) == "error: there is no such tool"
    assert house.sent == [["ben", "blue lamp"]]


def test_the_agent_gives_up_after_its_ninth_call_or_when_no_tool_is_called(errands: Any, server: Any) -> None:
    server.answers = [wish("go", "room", "attic")] * 12
    assert errands.agent.run(TASK) == {"sent": []}
    assert len(server.asked) == 9
    server.answers, server.asked = ["done"], []
    assert errands.agent.run(TASK) == {"sent": []}
    assert len(server.asked) == 1


def test_arguments_that_are_no_json_are_answered_with_an_error(errands: Any, server: Any) -> None:
    broken = {"tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "go", "arguments": "{attic"}}]}
    server.answers = [broken, "done"]
    errands.agent.run(TASK)
    assert server.asked[1]["messages"][-1]["content"] == "error: arguments must be json"


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [["anna", "red lamp"]],
        [["anna", "blue lamp"], ["ben", "blue cup"]],
        [["ben", "red lamp"], ["anna", "blue cup"]],
        [["anna", "red lamp"], ["ben", "blue cup"], ["dan", "red rope"]],
        None,
        "all",
        [None],
    ],
)
def test_anything_but_what_was_asked_for_earns_nothing(errands: Any, sent: object) -> None:
    assert errands.tasks.reward(TASK, {"sent": sent}) == 0.0
    assert errands.tasks.reward(TASK, sent) == 0.0


def test_the_order_of_errands_does_not_matter(errands: Any) -> None:
    assert errands.tasks.reward(TASK, {"sent": [["ben", "blue cup"], ["anna", "red lamp"]]}) == 1.0


def test_about_a_fifth_of_the_demonstrations_succeeds_and_all_perfect_ones_do(errands: Any) -> None:
    def rewards(*, perfect: bool) -> list[float]:
        shown = errands.demonstrations.demonstrations(seed=0, count=COUNT, perfect=perfect)
        return [errands.tasks.reward(errands.tasks.as_task(d.problem, "x")["input"], {"sent": [list(s) for s in d.sent]}) for d in shown]

    assert 0.12 < sum(rewards(perfect=False)) / COUNT < 0.3
    assert set(rewards(perfect=True)) == {1.0}


def test_a_demonstration_is_what_the_agent_would_have_recorded(errands: Any, server: Any) -> None:
    for demonstration in errands.demonstrations.demonstrations(seed=1, count=5):
        script = [message for message in demonstration.messages if message["role"] == "assistant"]
        server.answers, server.asked = [dict(message) for message in script], []
        errands.agent.run(errands.tasks.as_task(demonstration.problem, "x")["input"])
        assert server.asked[-1]["messages"] == list(demonstration.messages[:-1])


def test_the_agent_is_also_a_program(errands: Any, server: Any) -> None:
    server.answers = ["done"]
    command = [sys.executable, "agent.py"]
    done = subprocess.run(command, cwd=errands.folder, input=json.dumps(TASK), capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"sent": []}


def test_nothing_in_the_agent_knows_who_trains_it(errands: Any) -> None:
    for name in ("agent", "house"):
        assert "lightningrl" not in (errands.folder / f"{name}.py").read_text().lower()
