"""The team of planner, solver and critic in LangGraph, and its riddles, which depend on (split, seed) alone."""

from typing import Any

import pytest

COUNT = 300
RIDDLE = "ann has 3\nben has 2 more than ann\ndan has 2 times ben\nwhat has dan"
TASK = {"riddle": RIDDLE, "answer": "10"}


def roles(server: Any) -> list[str]:
    return [request["model"] for request in server.asked]


def test_tasks_follow_from_split_and_seed_alone(team: Any) -> None:
    first = team.tasks.tasks("train", seed=3, count=8)
    assert team.tasks.tasks("train", seed=3, count=12)[:8] == first
    assert team.tasks.tasks("train", seed=4, count=8) != first
    assert len({row["id"] for row in first}) == 8


def test_no_structure_is_in_both_splits_and_no_heldout_word_is_new(team: Any) -> None:
    train, heldout = (team.tasks.problems(split, seed=0, count=COUNT) for split in ("train", "heldout"))
    assert not {team.tasks.structure(p) for p in train} & {team.tasks.structure(p) for p in heldout}
    assert {word for p in heldout for word in p.riddle.split()} <= {word for p in train for word in p.riddle.split()}


def test_work_that_the_critic_approves_is_the_answer(team: Any, server: Any) -> None:
    server.answers = ["3 + 2 * 2", "5 10", "good"]
    output = team.agent.run(TASK)
    assert output == {"answer": "10", "plan": "3 + 2 * 2", "sums": "5 10", "looks": 1}
    assert team.tasks.reward(TASK, output) == 1.0
    assert roles(server) == ["planner", "solver", "critic"]
    assert server.asked[0]["messages"][-1]["content"] == RIDDLE
    assert server.asked[1]["messages"][-1]["content"] == "3 + 2 * 2"
    assert server.asked[2]["messages"][-1]["content"] == f"{RIDDLE}\nplan 3 + 2 * 2\nsums 5 10"


def test_wrong_sums_go_back_to_the_solver_and_a_wrong_plan_to_the_planner(
    team: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_LOOKS", "2")
    server.answers = ["3 - 2 * 2", "1 2", "plan", "3 + 2 * 2", "5 11", "sums", "5 10"]
    assert team.agent.run(TASK)["answer"] == "10"
    assert roles(server) == ["planner", "solver", "critic", "planner", "solver", "critic", "solver"]
    planned, solved = server.asked[3]["messages"], server.asked[6]["messages"]
    assert [m["content"] for m in planned] == ["plan", RIDDLE, "3 - 2 * 2", "again"]
    assert [m["content"] for m in solved] == ["solve", "3 + 2 * 2", "5 11", "again"]


def test_the_critic_checks_once_or_up_to_its_limit(team: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers = ["3 + 2", "5", "sums", "6"]
    assert team.agent.run(TASK)["answer"] == "6"
    assert roles(server) == ["planner", "solver", "critic", "solver"]
    monkeypatch.setenv("TEAM_LOOKS", "0")
    server.answers, server.asked = ["3 + 2", "5"], []
    assert team.agent.run(TASK)["answer"] == "5"
    assert roles(server) == ["planner", "solver"]


@pytest.mark.parametrize("answer", ["11", "", None, {}, {"answer": None}, {"answer": "5"}, 10])
def test_any_other_number_earns_nothing(team: Any, answer: object) -> None:
    assert team.tasks.reward(TASK, answer) == 0.0


def test_plans_are_worked_off_from_the_left(team: Any) -> None:
    assert team.tasks.sums_of("3 + 2 * 2") == "5 10"
    for row in team.tasks.tasks("train", seed=0, count=COUNT):
        assert 0 < int(row["input"]["answer"]) < 40


def test_every_role_slips_often_and_no_perfect_one_does(team: Any) -> None:
    shown, perfect = (
        team.demonstrations.demonstrations(seed=0, count=COUNT, perfect=perfect) for perfect in (False, True)
    )
    for role in ("plan", "solve", "check"):
        said, right = ([d.messages[2]["content"] for d in made if d.role == role] for made in (shown, perfect))
        assert len(said) == COUNT
        if role != "check":
            assert all(team.tasks.sums_of(plan) for plan in right if role == "plan")
        else:
            assert set(right) == {"good", "plan", "sums"} == set(said)
    problems = [
        team.demonstrations.random_problem(team.demonstrations.random.Random(f"demonstration-0-{i}"), heldout=False)
        for i in range(COUNT)
    ]
    plans = [d.messages[2]["content"] for d in shown if d.role == "plan"]
    wrong = sum(plan != team.tasks.plan_of(problem) for plan, problem in zip(plans, problems, strict=True)) / COUNT
    assert 0.35 < wrong < 0.65
    assert [d.messages[2]["content"] for d in perfect if d.role == "plan"] == [
        team.tasks.plan_of(problem) for problem in problems
    ]


def test_the_agent_has_no_trace_of_training(team: Any) -> None:
    assert "lightningrl" not in (team.folder / "agent.py").read_text().lower()
