"""Where a rollout is branched: chosen by what is known from others."""

import numpy as np

from lightningrl.algorithms.places import Differences, Way, places


def way(calls: int, *, role: str = "writer") -> Way:
    return Way(roles=[role] * calls, costs=np.arange(calls, 0.0, -1.0))


def test_the_place_of_a_trunk_does_not_depend_on_its_own_length() -> None:
    """But for places that it never reached."""
    for seed in range(50):
        chosen = [places([way(4), way(length), way(6)], count=3, seed=seed)[1] for length in (1, 3, 9)]
        assert chosen[0] == [c for c in chosen[2] if c < 1]
        assert chosen[1] == [c for c in chosen[2] if c < 3]


def test_places_are_shared_out_evenly_and_all_calls_are_equally_likely() -> None:
    drawn = [places([way(5)] * 4, count=6, seed=seed) for seed in range(300)]
    assert all(sorted(map(len, of)) == [1, 1, 2, 2] for of in drawn)
    counts = np.bincount([c for of in drawn for own in of for c in own], minlength=5)
    assert counts.min() > 0.85 * counts.mean()


def test_places_are_where_returns_differed_and_branches_are_cheap() -> None:
    known = Differences()
    for _ in range(50):
        known.add("writer", 0, [1.0, 1.0])
        known.add("writer", 1, [0.0, 1.0])
        known.add("writer", 2, [0.0, 1.0])
    drawn = [places([way(3), way(3)], count=2, seed=seed, differences=known) for seed in range(2000)]
    counts = np.bincount([c for of in drawn for own in of for c in own], minlength=3)
    assert counts[0] < 0.05 * counts.sum()
    assert 1.8 < counts[2] / counts[1] < 2.2  # half the cost


def test_a_lone_trunk_is_branched_where_those_of_other_tasks_have_calls() -> None:
    drawn = [places([way(4)], elsewhere=[way(4), way(2)], count=1, seed=seed) for seed in range(1000)]
    counts = np.bincount([c for [own] in drawn for c in own], minlength=4)
    assert counts.min() > 0 and counts[:2].sum() > 1.7 * counts[2:].sum()
    assert places([way(4)], count=1, seed=0) == [[0]], "nothing is known"


def test_other_tasks_decide_nothing_in_a_group_of_several_trunks() -> None:
    for seed in range(20):
        alone = places([way(4), way(6)], count=3, seed=seed)
        assert places([way(4), way(6)], elsewhere=[way(50)], count=3, seed=seed) == alone
