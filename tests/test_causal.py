"""Which call can be a consequence of which."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightningrl.causal import consequences, distances
from tests.algorithms.rollouts import call


def test_what_began_after_an_end_is_a_consequence_and_what_overlaps_is_not() -> None:
    planner, slow, quick, judge = (
        call(n, span=s) for n, s in {"p": (0, 1), "s1": (1, 4), "s2": (2, 3), "j": (4, 5)}.items()
    )
    after = consequences([planner, slow, quick, judge])
    assert after.astype(int).tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert distances(after).tolist() == [[0, 1, 1, 2], [-1, 0, -1, 1], [-1, -1, 0, 1], [-1, -1, -1, 0]]


def test_distance_is_that_of_the_longest_chain() -> None:
    calls = [
        call("a", span=(0, 1)),
        call("b", span=(1, 2)),
        call("c", span=(2, 3)),
        call("slow", span=(1, 3)),
        call("end", span=(3, 4)),
    ]
    assert distances(consequences(calls))[0].tolist() == [0, 1, 2, 1, 3]


def test_a_conversation_that_goes_on_is_a_consequence_whatever_the_clocks_say() -> None:
    calls = [call("a", span=(0, 5)), call("b", span=(0, 5)), call("a2", parent="a", span=(4, 6))]
    assert consequences(calls).astype(int).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_without_times_the_order_of_the_trajectory_is_taken() -> None:
    assert distances(consequences([call("a"), call("b"), call("c")])).tolist() == [[0, 1, 2], [-1, 0, 1], [-1, -1, 0]]
    assert distances(consequences([])).shape == (0, 0)


spans = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=8)


@given(spans)
def test_consequences_are_transitive_and_distances_follow_the_chains(drawn: list[tuple[int, int]]) -> None:
    calls = [call(f"c{i}", span=(begin, begin + length)) for i, (begin, length) in enumerate(sorted(drawn))]
    after = consequences(calls)
    D = distances(after)
    assert ((after.astype(int) @ after.astype(int) > 0) <= after).all()
    assert ((D > 0) == after).all()
    for c, d in np.argwhere(after):
        between = after[c] & after[:, d]
        assert D[c, d] == 1 + max(D[c, between], default=0)
