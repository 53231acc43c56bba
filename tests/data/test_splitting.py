"""A part of a forest has the calls that it keeps, token for token, and nothing else."""

from typing import Literal

import numpy as np
import pytest

from lightningrl.data.forest import Forest, build_forest, read_ids
from lightningrl.data.splitting import Part, split
from lightningrl.data.trie import count_unique
from lightningrl.trainer.conformance import lessons


def path(forest: Forest, token: int) -> list[int]:
    """The ids from the root to a token."""
    segment = int(np.searchsorted(forest.starts, token, side="right")) - 1
    ids = forest.token_ids[forest.starts[segment] : token + 1].tolist()
    while (segment := int(forest.parents[segment])) >= 0:
        ids = forest.token_ids[forest.starts[segment] : forest.starts[segment + 1]].tolist() + ids
    return ids


def check(whole: Forest, part: Part) -> None:
    found = part.forest
    for name in ("targets", "logprobs", "proximal", "advantages", "weights", "temperatures"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[part.terms], err_msg=name)
    for m, term in enumerate(part.terms):
        assert path(found, int(found.sources[m])) == path(whole, int(whole.sources[term]))
        assert part.calls[found.calls[m]] == whole.calls[term]
    for k, call in enumerate(part.calls):
        assert found.call_ids[k] == whole.call_ids[call]
        assert path(found, int(found.states[k])) == path(whole, int(whole.states[call]))
    assert (found.positions == [len(path(found, n)) - 1 for n in range(len(found.token_ids))]).all()
    same = whole.rollouts[part.terms]
    assert ((found.rollouts[:, None] == found.rollouts) == (same[:, None] == same)).all()
    assert set(found.rollouts.tolist()) == set(range(len(set(same.tolist()))))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("unit", ["call", "rollout"])
@pytest.mark.parametrize("whole", [False, True])
def test_parts_have_all_calls_once_and_only_the_tokens_that_these_read(
    seed: int, unit: Literal["call", "rollout"], whole: bool
) -> None:
    given = lessons(seed)
    left, found = [build_forest(given, whole=whole)], list[Forest]()
    while left:
        forest = left.pop()
        parts = split(forest, unit=unit)
        if parts is None:
            found.append(forest)
            continue
        for part in parts:
            check(forest, part)
            left.append(part.forest)
        assert sorted(np.concatenate([part.terms for part in parts])) == list(range(len(forest.targets)))
        assert sorted(np.concatenate([part.calls for part in parts])) == list(range(len(forest.call_ids)))
    rollouts = {lesson.rollout_id for lesson in given}
    assert len(found) == (len(given) if unit == "call" else len(rollouts))
    if unit == "call":
        by_id = {lesson.transition.call_id: lesson.transition for lesson in given}
        for forest in found:
            assert len(forest.token_ids) == count_unique([read_ids(by_id[forest.call_ids[0]])])
