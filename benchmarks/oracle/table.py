"""Measures every cell, compares it with theory's claim, and renders the tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .designs import Design, branched_groups, drawn_branched
from .estimates import estimates, gradient, moments, weighted, z_scores
from .groups import all_groups, drawn_groups
from .methods import ADVANTAGES, DESIGNS, LOOKS, METHODS, Claim, Method
from .worlds import PANEL, WORLDS, World

SIZE = 3
"""Rollouts per group when all groups are enumerated."""
DRAWN_SIZE, DRAWN = 8, 250
"""Rollouts per group, and number of groups, when they are sampled."""
DRAWN_DESIGN = Design(trunks=4, places=2, forks=2)
BRANCHED = "fork κ=1, shared"
"""The method that is tried in all `DESIGNS`."""
EXACT_WITHIN = 1e-6
"""Relative tolerance. Lessons keep advantages in float32; an exact mean is off by their rounding only."""
BIASED_BEYOND = 1e-3
"""A cell that theory calls biased must exceed this: the worlds are made to show it."""
SAME = 1e-4
"""Relative tolerance between a figure and the published one, on any machine."""
Z_WITHIN = 4.5
"""Standard errors. Sampling is seeded, so the result is reproducible."""
AGGREGATIONS = ("rollout-mean", "call-mean", "token-mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    world: str
    method: str
    advantage: str
    claim: Claim
    factor: float
    bias: float
    variance: float
    """Variance in groups of SIZE."""
    z: float | None = None
    """Largest deviation of a parameter over DRAWN groups, in standard errors. None if theory does not give the mean."""
    drawn_variance: float | None = None
    """Variance in groups of DRAWN_SIZE. None likewise."""

    def broken(self) -> str | None:
        """The bound that is violated; None if all hold."""
        expected = {"exact": 1.0, "scaled": (SIZE - 1) / SIZE}.get(self.claim)
        if self.advantage in AGGREGATIONS:
            expected = self.factor if self.claim == "scaled" else expected
        if expected is None:
            return None if self.bias > BIASED_BEYOND else f"should be biased, and is not (`{self.bias:.1e}`)"
        if self.bias > EXACT_WITHIN:
            return f"is biased (`{self.bias:.1e}`)"
        if abs(self.factor / expected - 1) > EXACT_WITHIN:
            return f"is `{self.factor:.7f}` times the gradient, not `{expected:.7f}`"
        if self.z is not None and self.z > Z_WITHIN:
            return f"is `{self.z:.1f}` standard errors off in sampled groups"
        return None

    def moved(self, published: Sequence["Cell"]) -> str | None:
        """The figure that differs from the published one; None if none does. This also bounds biased cells."""
        shown = next(
            (c for c in published if (c.world, c.method, c.advantage) == (self.world, self.method, self.advantage)),
            None,
        )
        if shown is None:
            return "is not in the published table"
        for name in ("factor", "bias", "variance"):
            was, now = getattr(shown, name), getattr(self, name)
            if abs(now - was) > SAME * abs(was) + EXACT_WITHIN:
                return f"has {name} `{now:.6g}`, and `{was:.6g}` was published"
        return None


def measure(method: Method, advantage: str, world: World, *, draw: bool = True) -> Cell:
    """Measure one cell: with all groups of SIZE, and, if theory gives the mean, with sampled groups."""
    paths, claim = world.paths(), method.claim(advantage, world.name)
    exact, paths = gradient(method, paths), method.prepare(paths)
    design = method.design
    groups, p = all_groups(paths, size=SIZE) if design is None else branched_groups(world, design)
    found = moments(estimates(method, advantage, groups), p, exact)
    cell = Cell(
        world=world.name,
        method=method.name,
        advantage=advantage,
        claim=claim,
        factor=found.factor,
        bias=found.bias,
        variance=found.variance,
    )
    if claim == "biased" or not draw:
        return cell
    factor = 1.0 if claim == "exact" else (DRAWN_SIZE - 1) / DRAWN_SIZE
    if design is None:
        groups = drawn_groups(paths, count=DRAWN, size=DRAWN_SIZE, seed=0)
    else:
        groups = drawn_branched(world, DRAWN_DESIGN, count=DRAWN, seed=0)
    g = estimates(method, advantage, groups)
    variance = float(g.var(axis=0, ddof=1).sum() / ((factor * exact) @ (factor * exact)))
    return replace(cell, z=float(np.abs(z_scores(g, factor * exact)).max()), drawn_variance=variance)


def measure_aggregation(aggregation: str, world: World) -> Cell:
    """Measure the weighted loss for `uniform` and `rloo`. As a mean over calls or tokens, only its direction counts."""
    method = METHODS[0]
    paths = world.paths()
    groups, p = all_groups(paths, size=SIZE)
    found = moments(weighted(aggregation, groups), p, gradient(method, paths))
    uneven = world.name == "retry" or (world.name, aggregation) == ("words", "call-mean")
    return Cell(
        world=world.name,
        method=method.name,
        advantage=aggregation,
        claim="biased" if uneven else "scaled",
        factor=found.factor,
        bias=found.bias,
        variance=found.variance,
    )


def measure_design(design: Design, world: World) -> Cell:
    """Measure `BRANCHED` with `rloo`, in groups that are branched in this way."""
    method = next(method for method in METHODS if method.name == BRANCHED)
    groups, p = branched_groups(world, design)
    found = moments(estimates(method, "rloo", groups), p, gradient(method, world.paths()))
    return Cell(
        world=world.name,
        method=method.name,
        advantage=design.name,
        claim="biased" if world.name in LOOKS.get(design.rule, ()) else "exact",
        factor=found.factor,
        bias=found.bias,
        variance=found.variance,
    )


def cells(worlds: Sequence[World] = WORLDS, methods: Sequence[Method] = METHODS) -> Iterable[Cell]:
    """Measure all cells of the table, one at a time."""
    for world in worlds:
        for method in methods:
            if world.name in method.worlds:
                yield from (measure(method, advantage, world) for advantage in method.advantages)
        yield from (measure_aggregation(aggregation, world) for aggregation in AGGREGATIONS)
    for design, names in DESIGNS.items():
        yield from (measure_design(design, world) for world in (*worlds, PANEL) if world.name in names)


def render(found: Sequence[Cell]) -> str:
    """The tables of docs/oracles.md."""
    at = {(cell.world, cell.method, cell.advantage): cell for cell in found}
    parts: list[str] = []
    for world in WORLDS:
        names = [method.name for method in METHODS if world.name in method.worlds]
        rows = [[name, *(_text(at.get((world.name, name, advantage))) for advantage in ADVANTAGES)] for name in names]
        parts += [f"### {world.name}: {world.about}", _table(["bias · variance", *ADVANTAGES], rows)]
    unbiased = [m.name for m in METHODS if any(m.claim("rloo", w) == "exact" for w in m.worlds)]
    rows = [[name, *(_drawn(at.get((world.name, name, "rloo"))) for world in WORLDS)] for name in unbiased]
    parts += [
        f"### Variance in groups of {DRAWN_SIZE}",
        _table(["with `rloo`", *(world.name for world in WORLDS)], rows),
    ]
    worlds = (*WORLDS, PANEL)
    rows = [[of.name, *(_text(at.get((world.name, BRANCHED, of.name))) for world in worlds)] for of in DESIGNS]
    parts += ["### Branches", _table([f"{BRANCHED}, `rloo`", *(world.name for world in worlds)], rows)]
    rows = [[name, *(_text(at[world.name, METHODS[0].name, name]) for world in WORLDS)] for name in AGGREGATIONS]
    parts += ["### Aggregation", _table(["bias · variance", *(world.name for world in WORLDS)], rows)]
    return "\n\n".join(parts) + "\n"


def _text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    bias = "0" if cell.claim != "biased" else f"**{100 * cell.bias:.2g} %**"
    return f"{bias} · {cell.variance:.1f}"


def _drawn(cell: Cell | None) -> str:
    return "" if cell is None or cell.drawn_variance is None else f"{cell.drawn_variance:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
