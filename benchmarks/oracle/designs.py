"""How are the rollouts of a group branched? All groups of a design with their probabilities, or sampled ones.

A design says how many trunks a group has, how many places, and how many branches there are at each. Its rule says how
places are chosen:

    others       as in a run (`algorithms/places.py`)
    one trunk    as in a run, but all in the same rollout
    own length   among the rollout's own calls: it looks at what followed the place, so it must show a bias
    own reward   in the rollout with the lowest reward: so must this

Legend: T trunks · N groups.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, combinations_with_replacement, product
from typing import Literal, TypeAlias

import numpy as np

from lightningrl.algorithms.places import Way, places
from lightningrl.types import Doubles

from .groups import Group
from .worlds import Path, World

Places: TypeAlias = tuple[tuple[int, ...], ...]
"""For each trunk the calls at which it is branched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    trunks: int = 2
    """Two in all designs that are enumerated."""
    places: int = 1
    forks: int = 1
    rule: Literal["others", "one trunk", "own length", "own reward"] = "others"

    @property
    def name(self) -> str:
        made = f"{_count(self.places, 'place')}, {_count(self.forks, 'branch', 'branches')} each"
        return made if self.rule == "others" else f"{made}, by {self.rule}"


def chances(trunks: Sequence[Path], *, design: Design) -> dict[Places, float]:
    """The probability of each choice of places, for two trunks."""
    first, second = (len(trunk.requests) for trunk in trunks)
    known = (first, second) if design.rule == "own length" else (second, first)
    lowest = [i for i in (0, 1) if trunks[i].trajectory.reward <= trunks[1 - i].trajectory.reward]
    more, fewer = (design.places + 1) // 2, design.places // 2
    shared_out = [(more, fewer), (fewer, more)]
    if design.rule in ("one trunk", "own reward"):
        branched = lowest if design.rule == "own reward" else (0, 1)
        shared_out = [(design.places, 0) if i == 0 else (0, design.places) for i in branched]
    found: dict[Places, float] = {}
    for counts in shared_out:
        of_first = _of_trunk(known[0], length=first, count=counts[0])
        of_second = _of_trunk(known[1], length=second, count=counts[1])
        for (a, p), (b, q) in product(of_first.items(), of_second.items()):
            found[a, b] = found.get((a, b), 0.0) + p * q / len(shared_out)
    return found


def _of_trunk(depth: int, *, length: int, count: int) -> dict[tuple[int, ...], float]:
    """The places of one trunk, chosen among `depth` calls."""
    found: dict[tuple[int, ...], float] = {}
    choices = list(combinations(range(depth), min(count, depth)))
    for drawn in choices:
        reached = tuple(c for c in drawn if c < length)
        found[reached] = found.get(reached, 0.0) + 1 / len(choices)
    return found


@cache
def branched_groups(world: World, design: Design) -> tuple[list[Group], Doubles]:
    """All N groups, regardless of order, and [N] the probability of each."""
    paths = world.paths()
    branches = {
        (k, c): world.branches(path, place=c) for k, path in enumerate(paths) for c in range(len(path.requests))
    }
    found: list[Group] = []
    p: list[float] = []
    for trunks, p_trunks in _multisets(range(len(paths)), [path.probability for path in paths], size=design.trunks):
        for chosen, p_chosen in chances([paths[k] for k in trunks], design=design).items():
            at = [(i, c) for i, own in enumerate(chosen) for c in own]
            drawn = [_continuations(branches[trunks[i], c], forks=design.forks) for i, c in at]
            for of_places in product(*drawn):
                made = [_named(paths[k], name=f"t{i}") for i, k in enumerate(trunks)]
                made += _all_named(at, [of for of, _ in of_places])
                found.append(made)
                p.append(p_trunks * p_chosen * math.prod(p for _, p in of_places))
    return found, np.array(p)


def drawn_branched(world: World, design: Design, *, count: int, seed: int) -> list[Group]:
    """Groups, sampled and branched as in a run."""
    rng = np.random.default_rng(seed)
    paths = world.paths()

    def draw(of: Sequence[Path], size: int) -> list[Path]:
        p = np.array([path.probability for path in of])
        return [of[int(k)] for k in rng.choice(len(of), size=size, p=p / p.sum())]

    found: list[Group] = []
    for n in range(count):
        trunks = draw(paths, design.trunks)
        chosen = places([_way(trunk) for trunk in trunks], count=design.places, seed=n)
        at = [(i, c) for i, own in enumerate(chosen) for c in own]
        of_places = [draw(world.branches(trunks[i], place=c), design.forks) for i, c in at]
        found.append([_named(trunk, name=f"t{i}") for i, trunk in enumerate(trunks)] + _all_named(at, of_places))
    return found


def _way(path: Path) -> Way:
    calls = path.trajectory.transitions
    return Way(roles=[call.agent for call in calls], costs=np.arange(len(calls), 0, -1.0))


def _continuations(branches: Sequence[Path], *, forks: int) -> list[tuple[list[Path], float]]:
    p = [branch.probability for branch in branches]
    return [([branches[k] for k in of], p_of) for of, p_of in _multisets(range(len(branches)), p, size=forks)]


def _multisets(items: Sequence[int], p: Sequence[float], *, size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Each way to draw `size` of the items, regardless of order, and its probability."""
    for of in combinations_with_replacement(items, size):
        orders = math.factorial(size) // math.prod(math.factorial(n) for n in Counter(of).values())
        yield of, orders * math.prod(p[k] for k in of)


def _all_named(at: Sequence[tuple[int, int]], of_places: Sequence[Sequence[Path]]) -> list[Path]:
    return [
        _named(branch, name=f"t{i}-at{c}-{k}", trunk=f"t{i}")
        for (i, c), branches in zip(at, of_places, strict=True)
        for k, branch in enumerate(branches)
    ]


@cache
def _named(path: Path, *, name: str, trunk: str = "") -> Path:
    """The same, with ids that are unique in its group."""
    calls = tuple(
        replace(
            call,
            call_id=f"{name}/{call.call_id}",
            parent_call_id=call.parent_call_id and f"{name}/{call.parent_call_id}",
            replays=call.replays and f"{trunk}/{call.replays}",
        )
        for call in path.trajectory.transitions
    )
    at = path.trajectory.branch
    branch = at and replace(at, attempt_id=trunk, call_id=f"{trunk}/{at.call_id}")
    return replace(path, trajectory=replace(path.trajectory, rollout_id=name, transitions=calls, branch=branch))


def _count(n: int, one: str, more: str = "") -> str:
    return f"{n} {one}" if n == 1 else f"{n} {more or one + 's'}"
