"""A forest contains every path once, and every sampled token as its own term."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl.data.forest import Forest, Lesson, build_forest, read_ids, unweighted
from lightningrl.data.packing import minibatches, pack, teaches
from lightningrl.trainer.conformance import lesson, lessons

RNG = np.random.default_rng(0)


def path(forest: Forest, token: int) -> list[int]:
    """Token ids from the root to a token, by following parents."""
    s = int(np.searchsorted(forest.starts, token, side="right")) - 1
    own = forest.token_ids[forest.starts[s] : token + 1].tolist()
    return own if forest.parents[s] < 0 else path(forest, int(forest.starts[forest.parents[s] + 1]) - 1) + own


def check(forest: Forest, made_from: list[Lesson]) -> None:
    terms = [(le, t) for le in made_from for t in range(len(le.weights)) if le.weights.any() and le.weights[t] != 0]
    assert len(forest.targets) == len(terms)
    for m, (le, t) in enumerate(terms):
        call = le.transition
        assert path(forest, int(forest.sources[m])) == [*call.prompt_ids.tolist(), *call.completion_ids[:t].tolist()]
        assert forest.targets[m] == call.completion_ids[t]
        assert forest.logprobs[m] == call.logprobs[t]
        assert forest.advantages[m] == le.advantages[t]
        assert forest.weights[m] == le.weights[t]
        assert forest.temperatures[m] == call.temperature
        assert forest.call_ids[forest.calls[m]] == call.call_id
        assert forest.proximal[m] == (call.logprobs if le.proximal is None else le.proximal)[t]
    rollout_of = [le.rollout_id for le, _ in terms]
    assert [rollout_of.index(name) for name in rollout_of] == [
        forest.rollouts.tolist().index(r) for r in forest.rollouts.tolist()
    ]
    kept = [le for le in made_from if le.weights.any()]
    assert [path(forest, int(state)) for state in forest.states] == [le.transition.prompt_ids.tolist() for le in kept]
    assert forest.call_ids == tuple(le.transition.call_id for le in kept)
    if forest.returns is not None:
        assert forest.returns.tolist() == [le.returns for le in kept]
    paths = {tuple(path(forest, n)) for n in range(len(forest.token_ids))}
    wanted = {
        tuple(ids[: n + 1])
        for le in made_from
        if le.weights.any()
        for ids in [read_ids(le.transition).tolist()]
        for n in range(len(ids))
    }
    assert paths == wanted
    assert len(forest.token_ids) == len(wanted)  # once each
    assert [len(path(forest, n)) - 1 for n in range(len(forest.token_ids))] == forest.positions.tolist()
    assert all(parent < s for s, parent in enumerate(forest.parents))
    assert (np.diff(forest.starts) > 0).all()
    assert forest.starts[0] == 0 and forest.starts[-1] == len(forest.token_ids)
    children = [p for p in forest.parents.tolist() if p >= 0]
    assert all(children.count(p) > 1 for p in children)  # path-compressed


def test_the_example_of_the_docstring() -> None:
    calls = [("c1", [1, 2, 3], [7, 9]), ("c2", [1, 2, 3, 7, 9, 4], [6, 9]), ("c3", [1, 2, 3], [8, 9])]
    forest = build_forest([lesson("g", name, prompt, completion, rng=RNG) for name, prompt, completion in calls])
    assert forest.token_ids.tolist() == [1, 2, 3, 7, 9, 4, 6, 8]
    assert forest.starts.tolist() == [0, 3, 7, 8]
    assert forest.parents.tolist() == [-1, 0, 0]
    assert list(zip(forest.sources[:2].tolist(), forest.targets[:2].tolist(), strict=True)) == [(2, 7), (3, 9)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)
        ),
        min_size=1,
        max_size=9,
    )
)
def test_any_calls_make_a_forest_of_exactly_their_prefixes(calls: list[tuple[list[int], list[int]]]) -> None:
    made_from = [lesson("g", f"c{i}", prompt, completion, rng=RNG) for i, (prompt, completion) in enumerate(calls)]
    check(build_forest(made_from), made_from)


def test_large_token_ids_are_told_apart() -> None:
    made_from = [
        lesson("g", f"c{i}", [token], [1, 2], rng=RNG) for i, token in enumerate([256, 1, 65536, 257, 200_000, 1])
    ]
    check(build_forest(made_from), made_from)


def test_weight_of_zero_leaves_out_a_token_or_a_call() -> None:
    made_from = lessons(3)
    made_from[1] = dataclasses.replace(made_from[1], weights=0 * made_from[1].weights)
    made_from[2].weights[0] = 0
    forest = build_forest(made_from)
    check(forest, made_from)
    assert made_from[1].transition.call_id not in forest.call_ids


def test_whole_forest_also_holds_what_has_no_weight() -> None:
    """For evaluation: the critic's value is needed before advantages are known."""
    made_from = [dataclasses.replace(le, weights=0 * le.weights) for le in lessons(3)]
    assert len(build_forest(made_from).targets) == 0
    forest = build_forest(made_from, whole=True)
    assert len(forest.targets) == sum(len(le.weights) for le in made_from)
    assert len(forest.states) == len(forest.call_ids) == len(made_from)
    assert not forest.weights.any()
    silent = unweighted(
        dataclasses.replace(
            made_from[0].transition, completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32)
        )
    )
    assert path(build_forest([silent], whole=True), 0) == silent.transition.prompt_ids.tolist()[:1]
    assert build_forest([silent], whole=True).states.tolist() == [len(silent.transition.prompt_ids) - 1]


def test_nothing_makes_an_empty_forest() -> None:
    forest = build_forest([])
    assert (len(forest.token_ids), len(forest.parents), len(forest.targets)) == (0, 0, 0)
    assert forest.starts.tolist() == [0]


def test_tokens_do_not_depend_on_the_order_of_calls() -> None:
    made_from = lessons(1)
    one, two = build_forest(made_from), build_forest(random.Random(0).sample(made_from, len(made_from)))
    for field in ("token_ids", "positions", "starts", "parents"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))


@pytest.mark.parametrize("max_tokens", [1, 10, 30, 10_000])
def test_packs_hold_what_teaches_once_within_the_limit(max_tokens: int) -> None:
    made_from = lessons(2, groups=4)
    made_from[3] = dataclasses.replace(made_from[3], advantages=0 * made_from[3].advantages)
    packs = pack(made_from, max_tokens=max_tokens)
    assert sorted(id(le) for p in packs for le in p) == sorted(id(le) for le in made_from if teaches(le))
    for p in packs:
        assert len(build_forest(p).token_ids) <= max_tokens or len({le.rollout_id for le in p}) == 1


def test_groups_stay_whole_where_they_fit() -> None:
    made_from = lessons(2, groups=6, group_size=2)
    largest = max(len(build_forest([le for le in made_from if le.group_id == f"g{g}"]).token_ids) for g in range(6))
    packs = pack(made_from, max_tokens=largest)
    assert len(packs) > 1
    assert sum(len({le.group_id for le in p}) for p in packs) == 6


def test_minibatches_split_a_batch_by_whole_groups_and_average_to_its_loss() -> None:
    made_from = lessons(2, groups=7)
    steps = minibatches(made_from, 3, seed=5)
    assert [len({le.group_id for le in s}) for s in steps] == [3, 2, 2]
    assert len({(le.group_id, i) for i, s in enumerate(steps) for le in s}) == 7
    assert sorted(le.transition.call_id for s in steps for le in s) == sorted(le.transition.call_id for le in made_from)
    total = np.mean([sum((le.weights * le.advantages).sum() for le in s) for s in steps])
    assert total == pytest.approx(sum((le.weights * le.advantages).sum() for le in made_from), rel=1e-12)


def test_minibatches_follow_from_the_seed_alone() -> None:
    made_from = lessons(2, groups=7)

    def order(seed: int) -> list[list[str]]:
        return [[le.transition.call_id for le in s] for s in minibatches(made_from, 3, seed=seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_every_minibatch_has_something_to_teach() -> None:
    made_from = [
        le if le.group_id in ("g1", "g4") else dataclasses.replace(le, advantages=0 * le.advantages)
        for le in lessons(2, groups=7)
    ]
    steps = minibatches(made_from, 4, seed=0)
    assert len(steps) == 2
    assert all(any(map(teaches, s)) for s in steps)
    assert sum(map(len, steps)) == len(made_from)
    assert minibatches([dataclasses.replace(le, advantages=0 * le.advantages) for le in made_from], 4, seed=0) == []
