"""The shortest agent: a loop over one tool on OpenAI's own client, a teacher in ten lines, a reward of one line."""

import asyncio
import json
from typing import Any

import pytest

TASK = {
    "question": "what is the city of the boss of ann?",
    "facts": {"boss of ann": "ben", "city of ann": "rome", "city of ben": "oslo", "pet of ben": "cat"},
    "answer": "oslo",
}
COUNT = 300


@pytest.fixture
def run(scratch: Any, server: Any) -> Any:
    """The agent, with a client for this test's server."""
    scratch.agent.client.cache_clear()
    return lambda task: asyncio.run(scratch.agent.run(task))


def look_up(fact: object, name: str = "call_0") -> dict[str, Any]:
    function = {"name": "look_up", "arguments": json.dumps({"fact": fact})}
    return {"content": None, "tool_calls": [{"id": name, "type": "function", "function": function}]}


def asked(scratch: Any, split: str) -> list[dict[str, Any]]:
    return [row["input"] for row in scratch.tasks.tasks(split, seed=0, count=COUNT)]


def test_the_agent_has_thirty_lines_of_code_and_no_trace_of_training(scratch: Any) -> None:
    text = (scratch.folder / "agent.py").read_text()
    assert len([line for line in text.splitlines() if line]) <= 30
    assert "lightningrl" not in text.lower()


def test_facts_go_to_the_model_until_it_answers(scratch: Any, server: Any, run: Any) -> None:
    server.answers = [look_up("boss of ann", "call_1"), look_up("city of ben", "call_2"), "oslo"]
    answer = run(TASK)
    assert (answer, scratch.agent.reward(TASK, answer)) == ("oslo", 1.0)
    told = [
        (message["tool_call_id"], message["content"])
        for message in server.asked[-1]["messages"]
        if message["role"] == "tool"
    ]
    assert told == [("call_1", "ben"), ("call_2", "oslo")]
    assert server.asked[0]["messages"][-1]["content"] == TASK["question"]
    assert server.keys == ["Bearer attempt-token"] * 3
    for before, after in zip(server.asked, server.asked[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_two_look_ups_in_one_answer_both_get_results(server: Any, run: Any) -> None:
    both = look_up("boss of ann", "call_1")["tool_calls"] + look_up("city of ann", "call_2")["tool_calls"]
    server.answers = [{"content": None, "tool_calls": both}, "rome"]
    assert run(TASK) == "rome"
    assert [message["content"] for message in server.asked[-1]["messages"][-2:]] == ["ben", "rome"]


@pytest.mark.parametrize("fact", ["aunt of ann", "", None, ["boss of ann"]])
def test_a_missing_fact_is_reported_to_the_model(server: Any, run: Any, fact: object) -> None:
    server.answers = [look_up(fact), "oslo"]
    assert run(TASK) == "oslo"
    assert server.asked[-1]["messages"][-1]["content"] == "no such fact"


def test_it_gives_up_after_four_calls_without_an_answer(scratch: Any, server: Any, run: Any) -> None:
    server.answers = [look_up("boss of ann")] * 9
    answer = run(TASK)
    assert (answer, len(server.asked)) == (None, 4)
    assert scratch.agent.reward(TASK, answer) == 0.0


@pytest.mark.parametrize("answer", ["rome", "", None, "oslo is it"])
def test_any_other_answer_earns_nothing(scratch: Any, answer: str | None) -> None:
    assert scratch.agent.reward(TASK, answer) == 0.0


def test_no_question_is_in_both_splits_and_no_heldout_word_is_new(scratch: Any) -> None:
    questions = {split: {task["question"] for task in asked(scratch, split)} for split in ("train", "heldout")}
    assert not questions["train"] & questions["heldout"]
    words = {split: {word for question in own for word in question.split()} for split, own in questions.items()}
    assert words["heldout"] <= words["train"]


def test_tasks_follow_from_the_seed(scratch: Any) -> None:
    assert scratch.tasks.tasks("train", seed=0, count=5) == scratch.tasks.tasks("train", seed=0, count=9)[:5]
    assert scratch.tasks.tasks("train", seed=1, count=5) != scratch.tasks.tasks("train", seed=0, count=5)


def test_only_the_right_way_leads_to_the_right_answer(scratch: Any) -> None:
    for task in asked(scratch, "train"):
        facts, answer = task["facts"], task["answer"]
        assert list(facts.values()).count(answer) == 1
        word, link, person = (
            task["question"].removeprefix("what is the ").removesuffix("?").replace(" of the ", " of ").split(" of ")
        )
        assert facts[f"{word} of {facts[f'{link} of {person}']}"] == answer


def test_the_teacher_does_every_task(scratch: Any) -> None:
    for task in asked(scratch, "train")[:50]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": scratch.agent.SYSTEM},
            {"role": "user", "content": task["question"]},
        ]
        for _ in range(2):
            [call] = scratch.teacher.teacher("", messages, scratch.agent.TOOLS)
            messages.append({"role": "tool", "content": task["facts"][call["arguments"]["fact"]]})
        assert scratch.agent.reward(task, scratch.teacher.teacher("", messages, scratch.agent.TOOLS)) == 1.0
