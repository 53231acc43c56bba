"""Questions depend on (split, seed) alone, each step can be looked up, and the reward is 0.9 · F1 + 0.1 · format."""

from typing import Any

import pytest

COUNT = 200


@pytest.fixture(scope="module")
def asked(rag: Any) -> dict[str, list[Any]]:
    return {split: rag.tasks.questions(split, seed=0, count=COUNT) for split in ("train", "heldout", "ood")}


def test_tasks_follow_from_split_and_seed_alone(rag: Any) -> None:
    first = rag.tasks.tasks("heldout", seed=3, count=8)
    assert rag.tasks.tasks("heldout", seed=3, count=12)[:8] == first
    assert rag.tasks.tasks("heldout", seed=4, count=8) != first
    assert len({row["id"] for row in first}) == 8


def test_a_known_task_is_the_same_on_every_machine(rag: Any) -> None:
    row = rag.tasks.tasks("heldout", seed=0, count=1)[0]["input"]
    assert row == {
        "question": "find the boss of the mayor of the seat of onyx robots",
        "world": "heldout-0",
        "hops": 3,
        "answer": "hugo dietz",
    }


def test_a_task_names_its_world_and_does_not_carry_it(rag: Any) -> None:
    row = rag.tasks.tasks("train", seed=0, count=1)[0]["input"]
    assert set(row) == {"question", "world", "hops", "answer"}
    assert sum(len(str(value)) for value in row.values()) < 200


def test_two_or_three_steps_are_learnt_and_four_are_asked_for_elsewhere(rag: Any, asked: dict[str, list[Any]]) -> None:
    assert {len(q.chain) for q in asked["train"]} == {len(q.chain) for q in asked["heldout"]} == {2, 3}
    assert {len(q.chain) for q in asked["ood"]} == {4}
    assert [row["input"]["hops"] for row in rag.tasks.ood("heldout", seed=0, count=5)] == [4] * 5


def test_no_name_and_no_composition_is_in_both_splits(rag: Any, asked: dict[str, list[Any]]) -> None:
    train, *others = ({q.world for q in questions} for questions in asked.values())
    known = {name for world in train for kind in rag.world.build_world(world).members.values() for name in kind}
    for worlds in others:
        assert not known & {
            name for world in worlds for kind in rag.world.build_world(world).members.values() for name in kind
        }
    assert not {q.chain for q in asked["train"]} & {q.chain for q in (*asked["heldout"], *asked["ood"])}


def test_no_word_is_held_out_and_none_means_two_things(rag: Any, asked: dict[str, list[Any]]) -> None:
    parts = [part for both in rag.names.PARTS.values() for text in both for part in text.split()]
    said = {
        word
        for template in (*rag.world.TEMPLATES, *rag.world.ASIDES, *rag.questions.WORDINGS)
        for word in template.split()
    }
    assert len(set(parts)) == len(parts)
    assert not set(parts) & (said | set(rag.world.RELATIONS))
    for kind in rag.names.PARTS:
        known = {part for name in rag.names.names(kind, heldout=False) for part in name.split()}
        assert {part for name in rag.names.names(kind, heldout=True) for part in name.split()} <= known
    for place in range(3):
        assert {q.chain[place] for q in asked["train"] if place < len(q.chain)} == set(rag.world.RELATIONS)


def test_a_world_has_hundreds_of_entities_with_one_value_for_each_relation(rag: Any) -> None:
    world = rag.world.build_world("heldout-1")
    assert sum(len(members) for members in world.members.values()) == 240
    facts = [p for p in world.passages if p.mood == "is"]
    assert len(facts) == len(world.facts) == sum(len(world.members[owner]) for owner, _ in rag.world.RELATIONS.values())
    assert all(world.facts[p.owner, p.relation] == p.value != p.owner for p in facts)
    doubts = [p for p in world.passages if p.mood in ("was", "is not")]
    assert len(doubts) > len(facts) / 2
    assert not any(world.facts[p.owner, p.relation] == p.value for p in doubts)
    assert len({p.text for p in world.passages}) == len(world.passages)


def test_every_step_finds_its_fact_among_three_passages_and_mostly_not_as_the_first(
    rag: Any, asked: dict[str, list[Any]]
) -> None:
    some = (*asked["train"][:60], *asked["heldout"], *asked["ood"])
    facts_of = {
        name: {p.text: p for p in rag.world.build_world(name).passages if p.mood == "is"}
        for name in {q.world for q in some}
    }
    steps = first = 0
    for q in some:
        facts = facts_of[q.world]
        for relation, owner, value, query in zip(q.chain, q.names, q.names[1:], rag.questions.queries(q), strict=False):
            lines = [
                line.removeprefix("- ") for line in rag.search.library_of({"world": q.world}).search(query).split("\n")
            ]
            right = [
                place
                for place, line in enumerate(lines)
                if line in facts and (facts[line].owner, facts[line].relation) == (owner, relation)
            ]
            assert len(lines) == 3 and len(right) == 1
            assert facts[lines[right[0]]].value == value
            steps, first = steps + 1, first + (right == [0])
    assert 0.25 < first / steps < 0.5


def test_three_passages_are_some_thirty_words(rag: Any) -> None:
    assert max(len(p.text.split()) for p in rag.world.build_world("train-0").passages) <= 10


@pytest.mark.parametrize(
    ("output", "f1", "form"),
    [
        ("<answer> tom hale </answer>", 1, 1),
        ("<answer>The Tom Hale.</answer>\n", 1, 1),
        ("after two searches: <answer> tom hale </answer>", 1, 1),
        ("tom hale", 1, 0),
        ("it is tom hale", 2 / 3, 0),
        ("<answer> tom moss </answer>", 1 / 2, 1),
        ("<answer> tom hale tom hale </answer>", 2 / 3, 1),
        ("<answer> ida reed </answer>", 0, 1),
        ("<answer> </answer>", 0, 1),
        ("<answer> tom hale </answer> or so", 1 / 2, 0),
        ("<answer> ida </answer> <answer> tom hale </answer>", 1, 1),
        ("<answer> ida <answer> tom hale </answer>", 1, 1),
        ("<answer> tom hale", 4 / 5, 0),
        ("", 0, 0),
    ],
)
def test_the_reward_is_a_tenth_for_the_format_and_the_rest_for_the_words(
    rag: Any, output: str, f1: float, form: float
) -> None:
    found = rag.tasks.reward({"answer": "tom hale"}, {"answer": output})
    assert (found["f1"], found["format"]) == (pytest.approx(f1), form)
    assert found["final"] == pytest.approx(0.9 * f1 + 0.1 * form)
    assert rag.tasks.reward({"answer": "tom hale"}, output) == found


def test_the_best_match_of_several_right_answers_counts(rag: Any) -> None:
    task = {"answer": "United States of America", "aliases": ["USA", "the US"]}
    assert rag.tasks.reward(task, "<answer>US</answer>")["final"] == 1.0
    assert rag.tasks.reward(task, "<answer>united states</answer>")["f1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("output", [None, 3, [], {}, {"answer": None}])
def test_an_output_without_an_answer_earns_nothing(rag: Any, output: object) -> None:
    assert rag.tasks.reward({"answer": "tom hale"}, output)["final"] == 0.0
