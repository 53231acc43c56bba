"""The rollouts of a group as one tree of calls."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.algorithms.lessons import lessons_of
from lightningrl.config import AlgorithmConfig
from lightningrl.errors import UserError
from lightningrl.look import opened
from lightningrl.look.group import branches, look_at_group
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Reward, Rollout, Task
from tests.algorithms.rollouts import call as transition
from tests.algorithms.rollouts import rollout
from tests.cli.test_rollouts import call

USER = {"role": "user", "content": "who?"}


def said(text: str, tool: str | None = None, tool_id: str = "") -> dict[str, Any]:
    if tool is None:
        return {"role": "assistant", "content": text}
    asked = {"id": tool_id, "type": "function", "function": {"name": "look_up", "arguments": tool}}
    return {"role": "assistant", "content": text or None, "tool_calls": [asked]}


def turn(attempt: str, index: int, messages: Sequence[dict[str, Any]], answer: dict[str, Any], **fields: Any) -> Call:
    response = {"choices": [{"index": 0, "message": answer, "finish_reason": "stop"}]}
    given = {"request": {"model": "m", "messages": list(messages)}, "response": response, **fields}
    of = Attempt(id=attempt, rollout_id=attempt, number=1, token="t")
    parent = {"parent_call_id": f"{attempt}-{index - 1}", "capture": "bridged"} if index else {}
    return call(of, index, prompt=[1] * (index + 1), said=[2], **{**parent, **given})


def looked_up(name: str, found: str, last: str) -> list[Call]:
    """A rollout of two calls: it looks `eva` up, and answers what it found. Its tool call has an id of its own."""
    asks = said("", '{"name": "eva"}', tool_id=f"id-{name}")
    result = {"role": "tool", "tool_call_id": f"id-{name}", "content": found}
    return [turn(name, 0, [USER], asks), turn(name, 1, [USER, asks, result], said(last))]


def test_rollouts_part_where_an_answer_or_a_tool_result_differs() -> None:
    calls = {
        "a": looked_up("a", "in Rome", "Rome"),
        "b": looked_up("b", "in Rome", " Rome "),
        "c": looked_up("c", "in Paris", "Rome"),
        "d": [turn("d", 0, [USER], said("Rome"))],
        "e": [],
    }
    trunk, nodes = branches(calls, rewards={"a": 1.0, "b": 0.0, "c": 0.5, "d": None, "e": None}, lessons={})
    assert [message.content for message in trunk] == ["who?"]
    assert [(node.id, node.parent, node.depth, list(node.calls), node.reward) for node in nodes] == [
        ("0", None, 0, ["a", "b", "c"], 0.5),
        ("0.0", "0", 1, ["a", "b"], 0.5),
        ("0.1", "0", 1, ["c"], 0.5),
        ("1", None, 0, ["d"], None),
    ]
    assert nodes[0].messages == () and [message.content for message in nodes[2].messages] == ["in Paris"]
    assert nodes[1].calls == {"a": 2, "b": 2}
    json.dumps([node.as_json() for node in nodes])


def test_first_messages_that_differ_are_not_in_the_trunk() -> None:
    system = {"role": "system", "content": "be brief"}
    calls = {
        "a": [turn("a", 0, [system, USER], said("x"))],
        "b": [turn("b", 0, [system, {"role": "user", "content": "where?"}], said("x"))],
    }
    trunk, nodes = branches(calls, rewards={}, lessons={})
    assert [message.role for message in trunk] == ["system"]
    assert [[message.content for message in node.messages] for node in nodes] == [["who?"], ["where?"]]


def test_the_same_words_of_another_agent_are_another_branch() -> None:
    calls = {name: [turn(name, 0, [USER], said("x"), agent=name)] for name in ("planner", "solver")}
    assert len(branches(calls, rewards={}, lessons={})[1]) == 2


def test_answers_that_cannot_be_read_are_compared_by_their_tokens() -> None:
    def broken(name: str, ids: list[int]) -> list[Call]:
        fields = {"capture": "incomplete", "completion_ids": np.array(ids, np.int32)}
        return [turn(name, 0, [USER], said("x"), logprobs=np.zeros(len(ids), np.float32), **fields)]

    calls = {"a": broken("a", [2]), "b": broken("b", [2]), "c": broken("c", [3])}
    assert [list(node.calls) for node in branches(calls, rewards={}, lessons={})[1]] == [["a", "b"], ["c"]]


def test_each_member_of_a_branch_has_its_own_advantage() -> None:
    calls = {name: [turn(name, 0, [USER], said("x"))] for name in ("a", "b")}
    trajectories = [rollout(name, reward, transition(f"{name}-0")) for name, reward in (("a", 1.0), ("b", 0.0))]
    made, _ = lessons_of(trajectories, AlgorithmConfig(advantage="dr_grpo"))
    lessons = {lesson.rollout_id: {lesson.transition.call_id: lesson} for lesson in made}
    _, (node,) = branches(calls, rewards={"a": 1.0, "b": 0.0}, lessons=lessons)
    assert node.advantages == {"a": 0.5, "b": -0.5}


async def test_a_group_is_read_from_the_store(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "store.sqlite")
    task = Task(id="t7", input={"question": "who?"}, split="train")
    await store.enqueue([Rollout(id=f"train-00004-000-0{n}", group_id="g", task=task) for n in range(3)])
    [(_, one), (_, two), _] = await store.claim("w", limit=3, lease_s=60)
    for attempt, reward in ((one, 1.0), (two, 0.0)):
        await store.append(turn(attempt.id, 0, [USER], said("x")))
        await store.finish(attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=reward)])
    await store.close()
    async with opened(tmp_path) as run:
        found = json.loads(json.dumps((await look_at_group(run, "g")).as_json()))
        with pytest.raises(UserError, match="no group `h`"):
            await look_at_group(run, "h")
    assert (found["group"], found["step"], found["mean"], found["std"]) == ("g", 5, 0.5, pytest.approx(0.5**0.5))
    assert [(m["status"], m["reward"], m["calls"], m["tokens"]) for m in found["members"]] == [
        ("succeeded", 1.0, 1, 1),
        ("succeeded", 0.0, 1, 1),
        ("running", None, 0, 0),
    ]
    (node,) = found["nodes"]
    assert node["members"] == ["train-00004-000-00", "train-00004-000-01"] and node["answer"]["content"] == "x"
