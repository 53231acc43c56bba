"""Packing: rollouts stay together, and no lesson with a gradient is left out, whatever the loss."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from lightningrl.config import LossConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.packing import as_a_whole, minibatches, pack, teaching_under, with_advantage, with_weight
from lightningrl.trainer.conformance import lessons


def silenced(made: list[Lesson], *rollouts: str) -> list[Lesson]:
    """Lessons with an advantage of 0 in these rollouts."""
    return [dataclasses.replace(le, advantages=0 * le.advantages) if le.rollout_id in rollouts else le for le in made]


def interleaved(made: list[Lesson]) -> list[Lesson]:
    """Lessons in random order, as if the calls of all rollouts arrived at random."""
    return [made[i] for i in np.random.default_rng(0).permutation(len(made))]


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 90, 10_000])
def test_rollout_is_never_split_over_forests(max_tokens: int) -> None:
    packs = pack(interleaved(lessons(2, groups=4, group_size=4)), max_tokens=max_tokens)
    homes: dict[str, set[int]] = {}
    for i, piece in enumerate(packs):
        for le in piece:
            homes.setdefault(le.rollout_id, set()).add(i)
    assert len(homes) == 16
    assert all(len(home) == 1 for home in homes.values())


def test_rollout_is_never_split_over_optimizer_steps() -> None:
    """Other libraries shuffle a rollout's rows over minibatches: then several versions of the weights train on it."""
    for count in (2, 3, 7):
        steps = minibatches(interleaved(lessons(2, groups=7)), count, seed=1)
        assert len(steps) == count
        assert len({(le.rollout_id, i) for i, step in enumerate(steps) for le in step}) == 7 * 3


def test_rollout_that_is_too_large_has_a_forest_of_its_own() -> None:
    made = lessons(2, groups=1, group_size=5, turns=4)
    sizes = {
        le.rollout_id: len(build_forest([x for x in made if x.rollout_id == le.rollout_id]).token_ids) for le in made
    }
    limit = sorted(sizes.values())[2]
    for piece in pack(made, max_tokens=limit):
        rollouts = {le.rollout_id for le in piece}
        assert len(build_forest(piece).token_ids) <= limit or len(rollouts) == 1


def test_what_teaches_depends_on_the_loss() -> None:
    for settings, critic, expected in (
        ({}, False, with_advantage),
        ({"name": "pg"}, True, with_weight),
        ({"name": "pg", "value_coef": 0.0}, True, with_advantage),
        ({"kl_coef": 0.1}, False, with_weight),
        ({"entropy_coef": 0.1}, False, with_weight),
        ({"ratio": "call"}, False, with_advantage),
        ({"ratio": "rollout"}, False, as_a_whole),
        ({"name": "pg", "importance": "rollout-mask"}, False, as_a_whole),
    ):
        given: dict[str, Any] = settings
        assert teaching_under(LossConfig(**given), critic=critic) is expected


def test_calls_without_advantage_are_kept_where_they_have_a_gradient() -> None:
    made = lessons(2)
    made[1] = dataclasses.replace(made[1], advantages=0 * made[1].advantages)  # in a rollout with a gradient
    made = silenced(made, "g1/0")
    made[2] = dataclasses.replace(made[2], weights=0 * made[2].weights)

    def kept(loss: LossConfig) -> set[int]:
        return {id(le) for piece in pack(made, max_tokens=10_000, teaching=teaching_under(loss)) for le in piece}

    silent = {id(le) for le in made if le.rollout_id == "g1/0"}
    everything = {id(le) for le in made}
    assert kept(LossConfig()) == everything - silent - {id(made[1]), id(made[2])}
    assert kept(LossConfig(ratio="rollout")) == everything - silent - {id(made[2])}
    assert kept(LossConfig(kl_coef=0.1)) == everything - {id(made[2])}
    assert {id(le) for piece in pack(made, max_tokens=9, teaching=list) for le in piece} == everything


def test_groups_without_advantage_are_dealt_a_step_where_they_have_a_gradient() -> None:
    made = lessons(2, groups=4)
    made = silenced(made, *{le.rollout_id for le in made})
    assert minibatches(made, 4, seed=0) == []
    assert len(minibatches(made, 4, seed=0, teaching=teaching_under(LossConfig(entropy_coef=0.1)))) == 4
