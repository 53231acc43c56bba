"""A world: people, towns and firms, ten relations, and a passage for each fact.

Everything depends on the world's name. A fact is true now. Other passages name the same people: former facts, false
ones, and asides.

    the boss of mira voss is seth hale            the fact
    as boss of ida reed there was seth hale       a former fact
    for mira voss the boss is not ida reed        a false one
    mira voss met dan pike                        an aside
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from names import Kind, names

Mood: TypeAlias = Literal["is", "was", "is not", "aside"]

RELATIONS: Mapping[str, tuple[Kind, Kind]] = {
    "boss": ("person", "person"),
    "teacher": ("person", "person"),
    "neighbour": ("person", "person"),
    "home": ("person", "town"),
    "employer": ("person", "firm"),
    "mayor": ("town", "person"),
    "twin": ("town", "town"),
    "founder": ("firm", "person"),
    "seat": ("firm", "town"),
    "rival": ("firm", "firm"),
}
"""Relation → (kind of its owner, kind of its value). Each owner has exactly one value."""
POPULATION: Mapping[Kind, int] = {"person": 120, "town": 60, "firm": 60}
TEMPLATES = (
    "the {relation} of {owner} {mood} {value}",
    "for {owner} the {relation} {mood} {value}",
    "as {relation} of {owner} there {mood} {value}",
)
"""All have the same number of words that a search indexes, so none ranks higher. The value stands last: a reader from
left to right then knows its owner.
"""
ASIDES = ("{owner} met {value}", "{owner} wrote to {value}", "{owner} saw {value}")
DOUBTFUL: tuple[Mood, ...] = ("was", "is not")
DOUBTS = 0.8
"""Share of facts with a former value, and share with a false one."""
DOUBTS_WITHIN_KIND = 0.5
"""Share of facts with one of the two if owner and value are of one kind: each name is then also a value elsewhere."""
CACHED = 64
"""Worlds kept in memory, about one megabyte each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    text: str
    owner: str
    relation: str
    """"" for an aside."""
    value: str
    mood: Mood


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    name: str
    """`train-3` or `heldout-0`."""
    members: Mapping[Kind, tuple[str, ...]]
    facts: Mapping[tuple[str, str], str]
    """(owner, relation) → value."""
    passages: tuple[Passage, ...]


@lru_cache(maxsize=CACHED)
def build_world(name: str) -> World:
    rng = random.Random(f"world-{name}")
    heldout = not name.startswith("train")
    members: dict[Kind, tuple[str, ...]] = {
        kind: tuple(rng.sample(names(kind, heldout=heldout), count)) for kind, count in POPULATION.items()
    }
    facts: dict[tuple[str, str], str] = {}
    passages: list[Passage] = []
    for relation, (owners, values) in RELATIONS.items():
        for owner, value in _matched(members[owners], members[values], rng):
            facts[owner, relation] = value
            others = [other for other in members[values] if other not in (owner, value)]
            passages += _about(owner, relation, value, others, within=owners == values, rng=rng)
    passages += _asides(members, rng)
    rng.shuffle(passages)
    return World(name=name, members=members, facts=facts, passages=tuple(passages))


def _matched(owners: Sequence[str], values: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """A value for each owner, never itself. All values occur equally often, or at most once if there are enough."""
    order = rng.sample(values, len(values))
    if set(owners) == set(values):
        return zip(order, [*order[1:], order[0]], strict=True)
    return zip(owners, [order[index % len(order)] for index in range(len(owners))], strict=True)


def _about(
    owner: str, relation: str, value: str, others: Sequence[str], *, within: bool, rng: random.Random
) -> Iterator[Passage]:
    """The fact and doubts about it; at most one doubt `within` a kind."""
    moods: list[Mood] = ["is"]
    if not within:
        moods.extend(mood for mood in DOUBTFUL if rng.random() < DOUBTS)
    elif rng.random() < DOUBTS_WITHIN_KIND:
        moods.append(rng.choice(DOUBTFUL))
    for mood, said in zip(moods, [value, *rng.sample(others, len(moods) - 1)], strict=True):
        text = rng.choice(TEMPLATES).format(owner=owner, relation=relation, value=said, mood=mood)
        yield Passage(text=text, owner=owner, relation=relation, value=said, mood=mood)


def _asides(members: Mapping[Kind, Sequence[str]], rng: random.Random) -> Iterator[Passage]:
    for person in members["person"]:
        other = rng.choice([name for kind in members for name in members[kind] if name != person])
        yield Passage(
            text=rng.choice(ASIDES).format(owner=person, value=other),
            owner=person,
            relation="",
            value=other,
            mood="aside",
        )
