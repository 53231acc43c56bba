"""Errands depend on (split, seed) alone, the agent is a plain loop over tool calls, and only the end is rewarded."""

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


def test_errands_take_three_calls_each_and_earn_one(errands: Any, server: Any) -> None:
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


def test_impossible_actions_and_wrong_parcels_are_errors(errands: Any) -> None:
    house = errands.house.House(TASK["rooms"], TASK["wanted"])
    assert house.call("take", {"thing": "red lamp"}) == 'error: there is no "red lamp" here'
    assert house.call("send", {"person": "anna"}) == "error: you hold nothing"
    assert house.call("go", {"room": "moon"}) == "error: there is no moon"
    assert house.call("go", {"room": "cellar"}) == "you see nothing"
    assert house.call("go", {"room": "attic"}) == 'you see "blue lamp", "red lamp"'
    assert house.call("go", {"room": "attic"}) == "error: you are in the attic"
    assert house.call("take", {"thing": "blue lamp"}) == 'you hold "blue lamp"'
    assert house.call("take", {"thing": "red lamp"}) == 'error: you hold "blue lamp"'
    assert house.call("send", {"person": "nobody"}) == "error: there is no nobody"
    assert house.call("send", {"person": "anna"}) == "error: anna did not ask for it"
    assert house.call("send", {"person": "anna"}) == "error: you hold nothing", "a parcel for the wrong person is gone"
    assert house.call("take", {"thing": "red lamp"}) == 'you hold "red lamp"'
    assert house.call("send", {"person": "anna"}) == "sent"
    assert house.call("fly", {}) == house.call("go", {"thing": 1}) == "error: there is no such tool"
    assert house.sent == [["anna", "red lamp"]]


def test_the_agent_gives_up_after_its_twelfth_call_or_when_no_tool_is_called(errands: Any, server: Any) -> None:
    server.answers = [wish("go", "room", "attic")] * 15
    assert errands.agent.run(TASK) == {"sent": []}
    assert len(server.asked) == 12
    server.answers, server.asked = ["done"], []
    assert errands.agent.run(TASK) == {"sent": []}
    assert len(server.asked) == 1


def test_arguments_that_are_no_json_are_answered_with_an_error(errands: Any, server: Any) -> None:
    broken = {"tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "go", "arguments": "{attic"}}]}
    server.answers = [broken, "done"]
    errands.agent.run(TASK)
    assert server.asked[1]["messages"][-1]["content"] == "error: arguments must be json"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([], 0.0),
        ([["anna", "red lamp"]], 0.5),
        ([["anna", "red lamp"], ["anna", "red lamp"]], 0.5),
        ([["anna", "blue lamp"], ["ben", "blue cup"]], 0.5),
        ([["ben", "red lamp"], ["anna", "blue cup"]], 0.0),
        ([["anna", "red lamp"], ["ben", "blue cup"], ["dan", "red rope"]], 1.0),
        ([None], 0.0),
    ],
)
def test_the_reward_is_the_share_of_wishes_that_were_met(errands: Any, sent: object, expected: float) -> None:
    assert errands.tasks.reward(TASK, {"sent": sent}) == expected


@pytest.mark.parametrize("output", [None, "all", [], {"sent": None}, {}])
def test_an_output_without_an_answer_earns_nothing(errands: Any, output: object) -> None:
    assert errands.tasks.reward(TASK, output) == 0.0


def test_the_order_of_errands_does_not_matter(errands: Any) -> None:
    assert errands.tasks.reward(TASK, {"sent": [["ben", "blue cup"], ["anna", "red lamp"]]}) == 1.0


def test_demonstrations_run_about_a_quarter_of_their_errands_and_perfect_ones_all(errands: Any) -> None:
    def rewards(*, perfect: bool) -> list[float]:
        shown = errands.demonstrations.demonstrations(seed=0, count=COUNT, perfect=perfect)
        return [
            errands.tasks.reward(errands.tasks.as_task(d.problem, "x")["input"], {"sent": [list(s) for s in d.sent]})
            for d in shown
        ]

    assert 0.2 < sum(rewards(perfect=False)) / COUNT < 0.33
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
    done = subprocess.run(
        command, cwd=errands.folder, input=json.dumps(TASK), capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {"sent": []}


def test_the_agent_has_no_trace_of_training(errands: Any) -> None:
    for name in ("agent", "house"):
        assert "lightningrl" not in (errands.folder / f"{name}.py").read_text().lower()
