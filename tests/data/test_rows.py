"""Every sampled token is in exactly one row, after exactly the tokens that it was sampled after."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl.data.forest import Lesson, build_forest, read_ids
from lightningrl.data.rows import Row, rows_of
from lightningrl.trainer.conformance import lesson, lessons

RNG = np.random.default_rng(0)
SHORT = st.lists(st.integers(0, 2), min_size=1, max_size=4)
CALLS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), SHORT), min_size=1, max_size=9)


def made(calls: list[tuple[list[int], list[int]]]) -> list[Lesson]:
    return [lesson("g", f"c{i}", prompt, completion, rng=RNG) for i, (prompt, completion) in enumerate(calls)]


def check(made_from: list[Lesson]) -> list[Row]:
    forest = build_forest(made_from)
    rows = rows_of(forest)
    kept = [(i, t) for i, le in enumerate(made_from) for t in np.flatnonzero(le.weights).tolist()]
    named = [term for row in rows for term in row.terms.tolist() if term >= 0]
    assert sorted(named) == list(range(len(kept)))  # each in one row, at one position
    row_of: dict[int, set[int]] = {}
    for number, row in enumerate(rows):
        tokens = row.token_ids.tolist()
        assert len(row.targets) == len(row.terms) == len(tokens)
        assert row.terms[-1] >= 0  # nothing is sent that no sampled token needs
        for at, (term, target) in enumerate(zip(row.terms.tolist(), row.targets.tolist(), strict=True)):
            if term >= 0:
                i, t = kept[term]
                call = made_from[i].transition
                assert tokens[: at + 1] == [*call.prompt_ids.tolist(), *call.completion_ids[:t].tolist()]
                assert target == call.completion_ids[t]
                row_of.setdefault(i, set()).add(number)
    assert all(len(numbers) == 1 for numbers in row_of.values())  # a call is not torn apart
    assert len(rows) <= len(row_of)
    for i, (number,) in row_of.items():
        assert not any(has_room(row, made_from[i]) for row in rows[:number]), "sent again for nothing"
    return rows


def has_room(row: Row, le: Lesson) -> bool:
    """Whether a row contains all tokens of a call, and predicts nothing else where the call's tokens are predicted."""
    taught = np.flatnonzero(le.weights)
    read = read_ids(le.transition)[: len(le.transition.prompt_ids) + int(taught[-1])]
    return row.token_ids[: len(read)].tolist() == read.tolist() and bool(
        (row.terms[len(le.transition.prompt_ids) - 1 + taught] < 0).all()
    )


@settings(max_examples=200, deadline=None)
@given(CALLS)
def test_every_sampled_token_is_in_one_row_after_its_own_prefix(calls: list[tuple[list[int], list[int]]]) -> None:
    check(made(calls))


@settings(max_examples=100, deadline=None)
@given(CALLS, st.integers(0, 2**32 - 1))
def test_so_it_is_where_some_tokens_have_no_weight(calls: list[tuple[list[int], list[int]]], seed: int) -> None:
    made_from, rng = made(calls), np.random.default_rng(seed)
    for le in made_from:
        le.weights[rng.random(len(le.weights)) < 0.4] = 0
    if any(le.weights.any() for le in made_from):
        check(made_from)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SHORT, SHORT), min_size=1, max_size=6))
def test_calls_of_one_conversation_share_one_row(turns: list[tuple[list[int], list[int]]]) -> None:
    history: list[int] = []
    calls: list[tuple[list[int], list[int]]] = []
    for asked, answer in turns:
        history = [*history, *asked]
        calls.append((history, answer))
        history = [*history, *answer]
    (row,) = check(made(calls))
    assert row.token_ids.tolist() == history[:-1]


@settings(max_examples=50, deadline=None)
@given(SHORT, st.lists(SHORT, min_size=2, max_size=6))
def test_calls_with_the_same_prompt_have_rows_of_their_own(prompt: list[int], answers: list[list[int]]) -> None:
    """Their first tokens are predicted at the same position, and a row has one target there."""
    rows = check(made([(prompt, answer) for answer in answers]))
    assert len(rows) == len(answers)


@pytest.mark.parametrize("seed", range(5))
def test_rollouts_with_rewritten_histories(seed: int) -> None:
    made_from = lessons(seed, groups=3, group_size=4, turns=4)
    rows = check(made_from)
    assert len(rows) < len(made_from)


def test_a_forest_by_hand() -> None:
    """The one of `Forest`'s docstring: the second call continues the first; the third answers the first's prompt."""
    rows = check(made([([1, 2, 3], [7, 9]), ([1, 2, 3, 7, 9, 4], [6, 9]), ([1, 2, 3], [8, 9])]))
    first, second = rows
    assert first.token_ids.tolist() == [1, 2, 3, 7, 9, 4, 6]
    assert first.targets.tolist() == [2, 3, 7, 9, 4, 6, 9]
    assert first.terms.tolist() == [-1, -1, 0, 1, -1, 2, 3]
    assert second.token_ids.tolist() == [1, 2, 3, 8]
    assert second.targets.tolist() == [2, 3, 8, 9]
    assert second.terms.tolist() == [-1, -1, 4, 5]


def test_without_weights_there_are_no_rows() -> None:
    silent = [dataclasses.replace(le, weights=0 * le.weights) for le in lessons(3)]
    assert rows_of(build_forest(silent)) == []
    assert rows_of(build_forest([])) == []


def test_half_a_million_tokens_take_less_than_a_second() -> None:
    calls: list[Lesson] = []
    for rollout in range(64):
        history = RNG.integers(0, 50_000, 8000).tolist()
        calls += [
            lesson("g", f"{rollout}/{turn}", history[: 800 * turn + 700], history[800 * turn + 700 :][:100], rng=RNG)
            for turn in range(10)
        ]
    forest = build_forest(calls)
    began = time.process_time()
    rows = rows_of(forest)
    assert time.process_time() - began < 1
    assert len(rows) == 64
    assert len(forest.token_ids) == sum(len(row.token_ids) for row in rows) > 500_000
