"""Questions: a chain of relations from a name to the answer. Each step can be looked up.

mira voss  → boss →  seth hale  → home →  oak ford  → mayor →  dan pike
name the mayor of the home of the boss of mira voss
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from names import is_heldout
from search import TOP
from world import CACHED, RELATIONS, World, build_world

WORLDS = {"train": 16, "heldout": 4, "ood": 4}
"""Number of worlds per split. `ood` asks longer questions about the worlds of `heldout`."""
HOPS = {"train": (2, 3), "heldout": (2, 3), "ood": (4,)}
WORDINGS = ("name the {chain}", "who or what is the {chain}", "find the {chain}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    world: str
    """The world's name."""
    chain: tuple[str, ...]
    """Relations in the order of look-up."""
    names: tuple[str, ...]
    """The owner of each step's relation, then the answer."""
    text: str

    @property
    def answer(self) -> str:
        return self.names[-1]


def random_question(rng: random.Random, split: str, *, world_number: int | None = None) -> Question:
    """A question of `train`, `heldout` or `ood`, about a random world or the one with `world_number`.

    Names and compositions of `train` never occur in the other two splits.
    """
    heldout = split != "train"
    number = rng.randrange(WORLDS[split]) if world_number is None else world_number
    world = build_world(f"{'heldout' if heldout else 'train'}-{number}")
    while True:
        question = _draw(rng, world, rng.choice(HOPS[split]))
        if (
            question is not None
            and is_new(question.chain) == heldout
            and all(can_be_found(world, query) for query in queries(question))
        ):
            return question


def queries(question: Question) -> list[str]:
    """The searches that answer it, one per step."""
    return [query(relation, owner) for relation, owner in zip(question.chain, question.names, strict=False)]


def query(relation: str, owner: str) -> str:
    return f"{relation} of {owner}"


def is_new(chain: Iterable[str]) -> bool:
    """Whether training never asks for these relations in this order."""
    return is_heldout(" of the ".join(chain))


def can_be_found(world: World, query: str) -> bool:
    """Whether all passages with every word of the query fit into one search result."""
    relation, _, first, second = query.split()
    found = _passages_by_word(world.name)
    return len(found[relation] & found[first] & found[second]) <= TOP


@lru_cache(maxsize=CACHED)
def _passages_by_word(world: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for index, passage in enumerate(build_world(world).passages):
        for word in passage.text.split():
            found.setdefault(word, set()).add(index)
    return found


def _draw(rng: random.Random, world: World, hops: int) -> Question | None:
    """None if the chain ends early or returns to an earlier name."""
    kind = rng.choice(tuple(world.members))
    names, chain = [rng.choice(world.members[kind])], list[str]()
    for _ in range(hops):
        possible = [relation for relation, (owners, _) in RELATIONS.items() if owners == kind and relation not in chain]
        if not possible:
            return None
        chain.append(rng.choice(possible))
        kind = RELATIONS[chain[-1]][1]
        names.append(world.facts[names[-1], chain[-1]])
    if len(set(names)) < len(names):
        return None
    asked = " of the ".join(reversed(chain)) + f" of {names[0]}"
    return Question(
        world=world.name, chain=tuple(chain), names=tuple(names), text=rng.choice(WORDINGS).format(chain=asked)
    )
