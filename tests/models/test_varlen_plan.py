"""The sequences of a forest: each token is a query once, and reads its ancestors and itself."""

import numpy as np
import pytest

from lightningrl.data.trie import Trie, build_trie
from lightningrl.models.varlen_plan import Plan, gathers_nothing, parts_of, plan_sequences, readers


def random_trie(seed: int, *, sequences: int = 12, words: int = 3, longest: int = 12) -> Trie:
    """A trie of random sequences over few words, so that many share prefixes."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, words, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(sequences)]
    return build_trie(made, tails=[1] * len(made))


def chain(*lengths: int) -> Trie:
    """One conversation: segments of these lengths, each the only child of the one before."""
    N = sum(lengths)
    return Trie(
        token_ids=np.zeros(N, np.int32),
        positions=np.arange(N, dtype=np.int32),
        starts=np.cumsum([0, *lengths], dtype=np.int32),
        parents=np.arange(-1, len(lengths) - 1, dtype=np.int32),
        tails=[],
    )


def plan_of(trie: Trie, *, window: int | None = None) -> Plan:
    return plan_sequences(trie.starts, trie.parents, trie.positions, window=window)


def keys_of_queries(plan: Plan, *, window: int | None = None) -> dict[int, list[int]]:
    """Query → the keys that a causal kernel, aligned at the ends, lets it read."""
    found: dict[int, list[int]] = {}
    for b in range(len(plan.query_ends) - 1):
        keys = plan.keys[plan.key_ends[b] : plan.key_ends[b + 1]].tolist()
        queries = range(plan.query_ends[b], plan.query_ends[b + 1])
        for i, query in enumerate(queries):
            end = len(keys) - len(queries) + i + 1
            assert query not in found
            found[query] = keys[0 if window is None else max(0, end - window) : end]
    return found


def path_of(trie: Trie, token: int) -> list[int]:
    """The ancestors of a token from its root, and the token itself."""
    segment = int(np.searchsorted(trie.starts, token, side="right")) - 1
    path = list(range(trie.starts[segment], token + 1))
    while (segment := int(trie.parents[segment])) >= 0:
        path = [*range(trie.starts[segment], trie.starts[segment + 1]), *path]
    return path


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_a_query_once_and_reads_its_path(seed: int, window: int | None) -> None:
    trie = random_trie(seed, words=1 + seed % 4, longest=1 + 3 * (seed % 5))
    plan = plan_of(trie, window=window)
    expected = {token: path_of(trie, token)[-(window or 10**6) :] for token in range(len(trie.token_ids))}
    assert keys_of_queries(plan, window=window) == expected
    assert plan.longest_queries == np.diff(plan.query_ends).max()
    assert plan.longest_keys == np.diff(plan.key_ends).max()


@pytest.mark.parametrize("seed", range(5))
def test_a_forest_has_one_sequence_per_leaf(seed: int) -> None:
    trie = random_trie(seed)
    leaves = set(range(len(trie.parents))) - set(trie.parents.tolist())
    assert len(plan_of(trie).query_ends) == 1 + len(leaves)


def test_a_conversation_without_branches_is_one_sequence_and_copies_nothing() -> None:
    plan = plan_of(chain(3, 1, 1, 4))
    assert plan.query_ends.tolist() == plan.key_ends.tolist() == [0, 9]
    assert gathers_nothing(plan)
    two = build_trie([np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)], tails=[1, 1])
    assert gathers_nothing(plan_of(two))
    assert not gathers_nothing(plan_of(random_trie(0)))


def test_a_window_gathers_only_the_keys_that_a_query_reaches() -> None:
    long = np.zeros(100, np.int32)
    branches = [np.append(long, np.int32(word)) for word in (1, 2, 3)]
    trie = build_trie(branches, tails=[1, 1, 1])
    assert len(plan_of(trie).keys) == 3 * 101
    assert len(plan_of(trie, window=4).keys) == 101 + 2 * 4


@pytest.mark.parametrize("seed", range(10))
def test_readers_are_the_rows_of_each_token_in_their_order(seed: int) -> None:
    keys = plan_of(random_trie(seed)).keys
    found = {
        int(token): rows.tolist() for tokens, group in readers(keys) for token, rows in zip(tokens, group, strict=True)
    }
    assert found == {token: np.flatnonzero(keys == token).tolist() for token in range(keys.max() + 1)}


@pytest.mark.parametrize("most_keys", [1, 20, 50, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_parts_have_the_sequences_in_order_and_few_keys(seed: int, most_keys: int) -> None:
    plan = plan_of(random_trie(seed))
    parts = parts_of(plan, most_keys=most_keys)
    assert np.concatenate([part.keys for part in parts]).tolist() == plan.keys.tolist()
    ends = [part.first + part.query_ends for part in parts]
    assert [0, *(end for some in ends for end in some[1:])] == plan.query_ends.tolist()
    for part in parts:
        assert len(part.keys) <= most_keys or len(part.query_ends) == 2
        assert part.longest_queries == np.diff(part.query_ends).max()
        assert part.longest_keys == np.diff(part.key_ends).max()
    if most_keys == 10**6:
        assert len(parts) == 1
