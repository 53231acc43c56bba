"""Questions about a shop depend on (split, seed) alone; demonstrations are wrong in the declared shares."""

from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.warmstart.demonstrations import answers_of
from lightningrl.warmstart.examples import examples_of

COUNT = 600


@pytest.fixture(scope="module")
def shown(shop: Any) -> list[Any]:
    return shop.demonstrations.demonstrations(seed=0, count=COUNT)


def reward(shop: Any, demonstration: Any) -> float:
    return shop.tasks.reward(
        shop.tasks.as_task(demonstration.problem, "x")["input"], demonstration.messages[-1]["content"]
    )


def test_tasks_follow_from_split_and_seed_alone(shop: Any) -> None:
    first = shop.tasks.tasks("train", seed=3, count=8)
    assert shop.tasks.tasks("train", seed=3, count=12)[:8] == first
    assert shop.tasks.tasks("train", seed=4, count=8) != first
    assert len({row["id"] for row in first}) == 8


def test_no_structure_is_in_both_splits_and_no_heldout_word_is_new(shop: Any) -> None:
    train, heldout = (shop.tasks.problems(split, seed=0, count=COUNT) for split in ("train", "heldout"))
    known, new = ({shop.tasks.structure(p) for p in problems} for problems in (train, heldout))
    assert not known & new
    assert {word for structure in new for word in structure.split()} <= {
        word for structure in known for word in structure.split()
    }
    assert len(new) > 10


def test_two_records_lead_to_the_answer(shop: Any) -> None:
    for row in shop.tasks.tasks("heldout", seed=0, count=100):
        asked, records = row["input"]["question"].split(), row["input"]["records"]
        field, person, deed = asked[2], asked[5], asked[6]
        assert records[f"{records[f'{person} {deed}']} {field}"] == row["input"]["answer"]
        assert asked[0] != person and f"{asked[0]} {deed}" in records


def test_no_other_path_leads_to_the_answer(shop: Any) -> None:
    for row in shop.tasks.tasks("train", seed=0, count=100):
        said = list(row["input"]["records"].values())
        assert len(set(said)) == len(said) == 8 + 32


@pytest.mark.parametrize(
    ("output", "expected"),
    [({"answer": "14"}, 1.0), ({"answer": " 14\n"}, 1.0), ("14", 1.0), ({"answer": "price 14"}, 0.0)],
)
def test_the_right_number_earns_one(shop: Any, output: object, expected: float) -> None:
    assert shop.tasks.reward({"answer": "14"}, output) == expected


@pytest.mark.parametrize("output", [None, 14, "", {}, {"answer": None}, {"answer": 14}, [], {"answer": "13"}])
def test_anything_else_earns_nothing(shop: Any, output: object) -> None:
    assert shop.tasks.reward({"answer": "14"}, output) == 0.0


def test_each_mistake_is_made_in_its_declared_share_of_the_cases(shop: Any, shown: list[Any]) -> None:
    for kind, share in shop.demonstrations.SLIPS.items():
        made = [d.slips[kind] for d in shown if d.slips[kind] is not None]
        deviation = (share * (1 - share) / len(made)) ** 0.5
        assert abs(sum(made) / len(made) - share) < 4 * deviation, kind


def test_demonstrations_earn_under_a_third_and_perfect_ones_all(shop: Any, shown: list[Any]) -> None:
    assert 0.2 < sum(reward(shop, d) for d in shown) / COUNT < 0.33
    assert {reward(shop, d) for d in shop.demonstrations.demonstrations(seed=0, count=100, perfect=True)} == {1.0}


def test_demonstrations_follow_from_the_seed_and_never_show_a_heldout_structure(shop: Any, shown: list[Any]) -> None:
    assert shop.demonstrations.demonstrations(seed=0, count=20) == shown[:20]
    assert shop.demonstrations.demonstrations(seed=1, count=20) != shown[:20]
    assert not any(shop.tasks.is_heldout(shop.tasks.structure(d.problem)) for d in shown)


def test_a_conversation_takes_less_than_60_tokens_and_an_answer_at_most_six(
    shop: Any, shown: list[Any], tmp_path: Path
) -> None:
    shop.warmstart.tokenizer_for([]).save_pretrained(tmp_path)
    answers = [answers_of({"messages": d.messages, "tools": shop.demonstrations.TOOLS}) for d in shown]
    examples = examples_of(answers, ChatTemplate.load(tmp_path), max_length=59)
    assert max(len(example.completion_ids) for own in examples for example in own) <= 6


def test_the_agent_has_no_trace_of_training(shop: Any) -> None:
    for name in ("agent.mjs", "package.json"):
        assert "lightningrl" not in (shop.folder / name).read_text().lower()
