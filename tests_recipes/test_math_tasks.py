"""Word problems depend on (split, seed) alone, splits share no structure, and only the right number earns 1."""

from typing import Any

import pytest

from lightningrl.recipe import load_config

COUNT = 120


def test_tasks_follow_from_split_and_seed_alone(math: Any) -> None:
    first = math.tasks.tasks("train", seed=3, count=8)
    assert math.tasks.tasks("train", seed=3, count=12)[:8] == first
    assert math.tasks.tasks("train", seed=4, count=8) != first
    assert len({row["id"] for row in first}) == 8


def test_no_structure_is_in_two_splits_and_no_heldout_word_is_new(math: Any) -> None:
    train, heldout, ood = (math.tasks.problems(split, seed=0, count=COUNT) for split in ("train", "heldout", "ood"))
    structures = [{math.stories.structure(p) for p in problems} for problems in (train, heldout, ood)]
    assert not structures[0] & structures[1] and not (structures[0] | structures[1]) & structures[2]
    shown = {math.stories.structure(d.problem) for d in math.demonstrations.demonstrations(seed=0, count=COUNT)}
    assert not shown & structures[1]
    words = [
        {word for p in problems for word in p.story.split() if not word.isdigit()} for problems in (train, heldout)
    ]
    assert words[1] <= words[0]


def test_problems_take_one_to_three_steps_of_which_single_ones_are_not_held_out_and_four_out_of_distribution(
    math: Any,
) -> None:
    assert {len(p.steps) for p in math.tasks.problems("heldout", seed=0, count=COUNT)} == {2, 3}
    assert {len(p.steps) for p in math.tasks.problems("train", seed=0, count=COUNT)} == {1, 2, 3}
    assert {len(p.steps) for p in math.tasks.problems("ood", seed=0, count=20)} == {4}
    assert math.tasks.ood("heldout", seed=0, count=3) == math.tasks.tasks("ood", seed=0, count=3)


def test_every_division_is_exact_and_no_number_is_there_twice(math: Any) -> None:
    for problem in math.tasks.problems("train", seed=0, count=COUNT):
        value = problem.start
        for step in problem.steps:
            assert step.operation != "/" or value % step.number == 0
            value = step.of(value)
            assert 0 < value <= math.stories.LARGEST
        numbers = [word for word in problem.story.split() if word.isdigit()]
        assert len(set(numbers)) == len(numbers) == 1 + len(problem.steps) + (problem.aside is not None)


def test_a_story_tells_its_program_and_asks_for_the_last_person(math: Any) -> None:
    for problem in math.tasks.problems("train", seed=0, count=COUNT):
        sentences = problem.story.splitlines()
        if problem.aside is not None:
            assert str(problem.aside_number) in sentences.pop(problem.aside_after + 1).split()
        first, *told, asked = sentences
        assert str(problem.start) in first.split()
        assert [str(step.number) in sentence.split() for step, sentence in zip(problem.steps, told, strict=True)] == [
            True
        ] * len(told)
        known = first.split()[0]
        for step, sentence in zip(problem.steps, told, strict=True):
            words = sentence.split()
            assert known in words, "each step starts from a known number"
            if step.kind in math.stories.NEWCOMERS:
                known = next(word for word in words if word in math.stories.PEOPLE and word != known)
        assert asked.split()[-1] == known


@pytest.mark.parametrize(
    ("right", "said", "expected"),
    [
        ("1776", "1776", 1.0),
        ("1776", "so ann has 1,776 apples.", 1.0),
        ("1776", "37 * 48 = 1776", 1.0),
        ("1776", "1776 and not 1775", 0.0),
        ("1776", "1776.4", 0.0),
        ("1776", "-1776", 0.0),
        ("1776", "1776.0", 1.0),
        ("1776", "", 0.0),
        ("1776", "many", 0.0),
        ("2/3", "0.6667", 1.0),
        ("2/3", "2 / 3", 1.0),
        ("2/3", "0.67", 0.0),
        ("2.5", "5/2", 1.0),
        ("5", "5/0", 0.0),
        ("B", "the answer is (b).", 1.0),
        ("B", "A", 0.0),
    ],
)
def test_the_last_number_must_be_the_right_one(math: Any, right: str, said: str, expected: float) -> None:
    assert math.tasks.reward({"answer": right}, {"answer": said}) == expected


@pytest.mark.parametrize("output", [None, 1776, [], {"answer": None}, {"answer": 1776}, {}])
def test_an_output_without_an_answer_earns_nothing(math: Any, output: object) -> None:
    assert math.tasks.reward({"answer": "1776"}, output) == 0.0


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("37 * 48 - 5", "1771"),
        ("(37 + 5) * 12", "504"),
        ("37+5*12", "97"),
        ("1776 / 48", "37"),
        ("1 / 3", "0.333333333333"),
        ("-19 * 5", "-95"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 10", "1024"),
        (" 7 ", "7"),
        ("7 / (3 - 3)", "error: division by zero"),
        ("9 ** 99", "error: too large"),
        ("0 ** -1", "error: division by zero"),
        ("37 *", "error: not an expression"),
        ("", "error: not an expression"),
        ("ann + ben", "error: not an expression"),
        ("__import__('os')", "error: not an expression"),
        ("'a' * 9", "error: not an expression"),
        ("True + 1", "error: not an expression"),
        ("1e999", "error: not an expression"),
        ("7 // 2", "error: not an expression"),
        ("1 + " * 60 + "1", "error: too long"),
        ("\0", "error: not an expression"),
    ],
)
def test_the_calculator_is_exact_and_answers_errors_in_a_line(math: Any, expression: str, answer: str) -> None:
    assert math.calculator.calculator(expression) == answer


def test_demonstrations_solve_under_half_of_their_problems_and_perfect_ones_all(math: Any) -> None:
    def rewards(*, perfect: bool) -> list[float]:
        shown = math.demonstrations.demonstrations(seed=0, count=400, perfect=perfect)
        return [math.tasks.reward(math.tasks.as_task(d.problem, "x")["input"], {"answer": d.answer}) for d in shown]

    assert 0.2 < sum(rewards(perfect=False)) / 400 < 0.5
    assert set(rewards(perfect=True)) == {1.0}


def test_each_step_is_worked_out_from_the_result_of_the_one_before(math: Any) -> None:
    steps = tuple(
        math.stories.Step(kind=kind, number=number) for kind, number in (("gain", 5), ("times", 12), ("times-as", 6))
    )
    problem = math.stories.Problem(start=37, steps=steps, aside="other-", aside_after=2, aside_number=12, story="")
    assert math.demonstrations.expressions(problem) == ["37 + 5", "42 * 12", "504 / 6"]
    slip = math.demonstrations.expressions
    assert slip(problem, frozenset({"brackets"})) == ["37 + 5 * 12 / 6"]
    assert slip(problem, frozenset({"aside"})) == ["37 + 5", "42 * 12", "504 - 12", "492 / 6"]
    assert slip(problem, frozenset({"short"})) == ["37 + 5", "42 * 12"]
    assert slip(problem, frozenset({"again"})) == ["37 + 5", "42 * 12", "504 / 6", "504 / 6"]


def test_the_agent_has_no_trace_of_training(math: Any) -> None:
    for name in ("agent", "workbench", "calculator"):
        assert "lightningrl" not in (math.folder / f"{name}.py").read_text().lower()


def test_the_configurations_resolve_to_what_is_there(math: Any) -> None:
    for name, source in (("recipe", "tasks:tasks"), ("gpu", "calc_x:tasks")):
        config = load_config(math.folder / f"{name}.toml")
        assert (config.tasks.source, config.agent.entry, config.agent.reward) == (source, "agent:run", "tasks:reward")
