"""A few cells of the oracles, and the page that shows all of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.oracle.estimates import all_groups, estimates, expected_return, gradient
from benchmarks.oracle.methods import METHODS
from benchmarks.oracle.table import Cell, measure, measure_aggregation, render
from benchmarks.oracle.worlds import WORLDS, World

ROOT = Path(__file__).parents[2]
METHOD = {method.name: method for method in METHODS}
WORLD = {world.name: world for world in WORLDS}


@pytest.fixture(scope="module")
def published() -> list[Cell]:
    return [Cell(**row) for row in json.loads((ROOT / "benchmarks" / "results" / "oracles.json").read_text())]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_probabilities_sum_to_one_and_the_gradient_is_the_slope_of_the_expected_return(world: World) -> None:
    paths = world.paths()
    assert sum(path.probability for path in paths) == pytest.approx(1, abs=1e-14)
    for method in (METHOD["uniform"], METHOD["air"]):
        slope = [
            (expected_return(method, world, world.theta + h) - expected_return(method, world, world.theta - h)) / 2e-5
            for h in 1e-5 * np.eye(len(world.theta))
        ]
        np.testing.assert_allclose(gradient(method, paths), slope, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "advantage", "world"),
    [
        ("uniform", "rloo", "fork"),
        ("uniform", "dr_grpo", "retry"),
        ("uniform", "opo", "retry"),
        ("uniform", "grpo", "words"),
        ("discounted γ=0.8", "rloo", "fork"),
        ("air, potential", "rloo", "fork"),
        ("gae_calls λ=1, wrong critic", "rloo", "words"),
        ("gae_calls λ=0.5, right critic", "rloo", "fork"),
        ("gigpo ω=1", "rloo", "fork"),
        ("tree_loo κ=0", "rloo", "retry"),
        ("tree_loo κ=1", "opo", "fork"),
    ],
)
def test_measured_again_a_cell_keeps_its_bounds_and_is_the_published_one(
    published: list[Cell], method: str, advantage: str, world: str
) -> None:
    cell = measure(METHOD[method], advantage, WORLD[world], draw=False)
    assert cell.broken() is None and cell.moved(published) is None
    assert "bias" in str(replace(cell, bias=cell.bias + 1e-3).moved(published))


def test_shrinkage_moves_the_estimates_of_groups_and_not_their_mean() -> None:
    paths = WORLD["fork"].paths()
    groups, p = all_groups(paths, size=3)
    found = [
        estimates(replace(METHOD["tree_loo κ=1"], options={"shrinkage": kappa}), "rloo", paths, groups)
        for kappa in (0.0, 0.3, 1.0, 50.0)
    ]
    for g in found[1:]:
        assert np.abs(g - found[0]).max() > 1e-2
        np.testing.assert_allclose(p @ g, p @ found[0], atol=1e-7)


def test_rollouts_of_different_lengths_bias_every_mean() -> None:
    assert [
        measure_aggregation(name, WORLD["retry"]).broken() for name in ("rollout-mean", "call-mean", "token-mean")
    ] == [None] * 3


def test_a_broken_bound_is_found() -> None:
    cell = measure(METHOD["uniform"], "rloo", WORLD["retry"], draw=False)
    assert cell.broken() is None
    assert "is biased" in str(replace(cell, bias=1e-3).broken())
    assert "times the gradient" in str(replace(cell, factor=1.01).broken())
    assert "standard errors" in str(replace(cell, z=5.0).broken())
    assert "should be biased" in str(replace(cell, claim="biased").broken())


def test_the_page_shows_what_was_measured(published: list[Cell]) -> None:
    assert [cell.broken() for cell in published if cell.broken()] == []
    page = (ROOT / "docs" / "oracles.md").read_text()
    assert page.endswith("`make oracles` -->\n\n" + render(published)), "make oracles"
