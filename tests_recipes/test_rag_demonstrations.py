"""Demonstrations are conversations that the agent could have had, wrong in the declared shares."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.warmstart.demonstrations import answers_of
from lightningrl.warmstart.examples import examples_of

COUNT = 600


@pytest.fixture(scope="module")
def shown(rag: Any) -> list[Any]:
    return rag.demonstrations.demonstrations(seed=0, count=COUNT)


def reward(rag: Any, demonstration: Any) -> float:
    return rag.tasks.reward(
        rag.tasks.as_task(demonstration.question, "x")["input"], demonstration.messages[-1]["content"]
    )["final"]


def test_demonstrations_follow_from_the_seed_alone(rag: Any) -> None:
    assert (
        rag.demonstrations.demonstrations(seed=5, count=20) == rag.demonstrations.demonstrations(seed=5, count=30)[:20]
    )
    assert rag.demonstrations.demonstrations(seed=6, count=20) != rag.demonstrations.demonstrations(seed=5, count=20)


def test_each_mistake_is_made_in_its_declared_share_of_the_cases(rag: Any, shown: list[Any]) -> None:
    possible, made = Counter[str](), Counter[str]()
    for demonstration in shown:
        possible.update(demonstration.possible)
        made.update(demonstration.slips)
    for name, share in rag.demonstrations.SLIPS.items():
        deviation = (share * (1 - share) / possible[name]) ** 0.5
        assert abs(made[name] / possible[name] - share) < 4 * deviation, name


def test_demonstrations_earn_about_a_fifth_and_perfect_ones_all(rag: Any, shown: list[Any]) -> None:
    assert 0.15 < sum(reward(rag, d) for d in shown) / COUNT < 0.25
    for d in rag.demonstrations.demonstrations(seed=0, count=200, perfect=True):
        assert reward(rag, d) == 1.0
        assert not any(d.slips.values())


def test_a_demonstration_is_what_the_agent_would_have_recorded(rag: Any, shown: list[Any]) -> None:
    for demonstration in shown[:100]:
        library = rag.search.library_of({"world": demonstration.question.world})
        roles = [message["role"] for message in demonstration.messages]
        searches = (len(roles) - 3) // 2
        assert roles == ["system", "user", *["assistant", "tool"] * searches, "assistant"]
        assert 1 <= searches <= 3
        for asked, found in zip(demonstration.messages[2:-1:2], demonstration.messages[3:-1:2], strict=True):
            assert found["content"] == library.search(
                json.loads(asked["tool_calls"][0]["function"]["arguments"])["query"]
            )


def test_demonstrations_never_show_a_heldout_world_or_composition(rag: Any, shown: list[Any]) -> None:
    for d in shown:
        assert d.question.world.startswith("train-")
        assert not rag.questions.is_new(d.question.chain)


def test_a_conversation_of_three_steps_takes_less_than_180_tokens(rag: Any, shown: list[Any], tmp_path: Path) -> None:
    rows = [{"messages": d.messages, "tools": rag.warmstart.TOOLS} for d in shown]
    rag.warmstart.tokenizer_for(rows).save_pretrained(tmp_path)
    examples = examples_of([answers_of(row) for row in rows], ChatTemplate.load(tmp_path), max_length=179)
    assert max(len(example.completion_ids) for answers in examples for example in answers) <= 12
