"""A few cells of the oracles, and the page that shows all of them."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.oracle.designs import Design, chances
from benchmarks.oracle.estimates import estimates, expected_return, gradient
from benchmarks.oracle.groups import all_groups
from benchmarks.oracle.methods import METHODS
from benchmarks.oracle.table import Cell, measure, measure_aggregation, measure_design, render
from benchmarks.oracle.worlds import PANEL, WORLDS, World
from lightningrl.algorithms.places import Way, places

ROOT = Path(__file__).parents[2]
METHOD = {method.name: method for method in METHODS}
WORLD = {world.name: world for world in WORLDS}


@pytest.fixture(scope="module")
def published() -> list[Cell]:
    return [Cell(**row) for row in json.loads((ROOT / "benchmarks" / "results" / "oracles.json").read_text())]


@pytest.mark.parametrize("world", [*WORLDS, PANEL], ids=lambda world: world.name)
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
        ("fork κ=1, shared", "rloo", "fork"),
        ("fork κ=1, full", "rloo", "fork"),
        ("fork κ=0, shared", "rloo", "words"),
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
        estimates(replace(METHOD["tree_loo κ=1"], options={"shrinkage": kappa}), "rloo", groups)
        for kappa in (0.0, 0.3, 1.0, 50.0)
    ]
    for g in found[1:]:
        assert np.abs(g - found[0]).max() > 1e-2
        np.testing.assert_allclose(p @ g, p @ found[0], atol=1e-7)


@pytest.mark.parametrize(
    ("design", "world"),
    [
        (Design(places=2, rule="one trunk"), PANEL),  # both solvers are branched, and the judge read both
        (Design(forks=2), PANEL),
        (Design(rule="own length"), WORLD["retry"]),
        (Design(rule="own reward"), WORLD["fork"]),
    ],
    ids=lambda of: of.name,
)
def test_branches_teach_the_gradient_unless_their_places_look_at_what_followed(
    published: list[Cell], design: Design, world: World
) -> None:
    cell = measure_design(design, world)
    assert cell.broken() is None and cell.moved(published) is None


def test_a_branch_of_parallel_calls_repeats_what_is_no_consequence_of_its_place() -> None:
    team = WORLD["team"]
    trunk = team.paths()[0]  # a planner, a solver, and at the same time a solver with two calls
    played = [[call.replays for call in team.branches(trunk, place=c)[0].trajectory.transitions] for c in range(4)]
    assert played == [
        [None, None, None, None],
        ["c0", None, "c2", "c3"],
        ["c0", "c1", None, None],
        ["c0", "c1", "c2", None],
    ]
    for c in range(4):
        assert sum(branch.probability for branch in team.branches(trunk, place=c)) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_places_are_enumerated_with_the_chances_of_a_run(count: int) -> None:
    paths = WORLD["retry"].paths()
    trunks = [next(path for path in paths if len(path.requests) == n) for n in (2, 3)]
    expected = chances(trunks, design=Design(places=count))
    ways = [Way(roles=["agent"] * n, costs=np.ones(n)) for n in (2, 3)]
    N = 4000
    drawn = Counter(tuple(map(tuple, places(ways, count=count, seed=seed))) for seed in range(N))
    assert sum(expected.values()) == pytest.approx(1) and set(drawn) <= set(expected)
    for chosen, p in expected.items():
        assert abs(drawn[chosen] / N - p) < 4.5 * np.sqrt(p * (1 - p) / N), chosen


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
