"""Demonstrations are conversations that the agent could have had, wrong in the declared shares."""

from collections import Counter
from typing import Any

import pytest

COUNT = 1000


@pytest.fixture(scope="module")
def shown(sql: Any) -> list[Any]:
    return sql.demonstrations.demonstrations(seed=0, count=COUNT)


def test_demonstrations_follow_from_the_seed_alone(sql: Any) -> None:
    assert (
        sql.demonstrations.demonstrations(seed=5, count=20) == sql.demonstrations.demonstrations(seed=5, count=30)[:20]
    )
    assert sql.demonstrations.demonstrations(seed=6, count=20) != sql.demonstrations.demonstrations(seed=5, count=20)


def test_each_mistake_is_made_in_its_declared_share_of_the_queries_that_allow_it(sql: Any, shown: list[Any]) -> None:
    allowed, made = Counter[str](), Counter[str]()
    for demonstration in shown:
        allowed.update(demonstration.possible)
        made.update(demonstration.slips)
    for name, share in sql.demonstrations.SLIPS.items():
        deviation = (share * (1 - share) / allowed[name]) ** 0.5
        assert abs(made[name] / allowed[name] - share) < 4 * deviation, name


def test_feedback_is_ignored_in_its_declared_share(sql: Any, shown: list[Any]) -> None:
    rewrites = sum(sum(m["role"] == "assistant" for m in d.messages) - 1 for d in shown)
    share = sql.demonstrations.IGNORES
    assert abs(sum(d.ignored for d in shown) / rewrites - share) < 4 * (share * (1 - share) / rewrites) ** 0.5


def test_most_demonstrations_fail_and_a_fair_share_succeeds(sql: Any, shown: list[Any]) -> None:
    rewards = [sql.tasks.reward(sql.tasks.as_task(d.problem, "x")["input"], d.messages[-1]["content"]) for d in shown]
    assert 0.15 < sum(rewards) / COUNT < 0.3


def test_perfect_demonstrations_all_succeed(sql: Any) -> None:
    for d in sql.demonstrations.demonstrations(seed=0, count=300, perfect=True):
        assert sql.tasks.reward(sql.tasks.as_task(d.problem, "x")["input"], d.messages[-1]["content"]) == 1.0
        assert not d.slips and not d.ignored


def test_a_demonstration_is_what_the_agent_would_have_recorded(
    sql: Any, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from langchain_core.messages import AIMessage

    for demonstration in shown[:40]:
        script = [m["content"] for m in demonstration.messages if m["role"] == "assistant"]
        seen: list[Any] = []

        def answer(role: str, messages: list[Any], script: list[str] = script, seen: list[Any] = seen) -> AIMessage:
            seen[:] = messages
            return AIMessage(script.pop(0))

        monkeypatch.setattr(sql.agent, "ask", answer)
        output = sql.agent.run(sql.tasks.as_task(demonstration.problem, "x")["input"])
        roles = {"human": "user", "ai": "assistant", "system": "system"}
        assert [{"role": roles[m.type], "content": m.content} for m in seen] == list(demonstration.messages[:-1])
        assert output["sql"] == demonstration.messages[-1]["content"]
        assert script == []


def test_demonstrations_never_show_a_heldout_schema_or_structure(sql: Any, shown: list[Any]) -> None:
    for d in shown[:300]:
        assert not sql.schema.is_heldout(d.problem.schema.signature())
        assert not sql.schema.is_heldout(sql.grammar.structure(d.problem.gold))
