"""Demonstrations for the warm start: whole conversations of the agent with a demonstrator who is often wrong.

The demonstrator follows the agent's own steps in real worlds. Each kind of mistake occurs in a fixed share of cases, so
imitation alone reaches about a fifth of the possible reward.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agent import INSTRUCTIONS
from questions import Question, query, random_question
from search import NOTHING, library_of
from world import CACHED, Passage, build_world

SLIPS: Mapping[str, float] = {"first": 0.2, "vague": 0.1, "turned": 0.15, "early": 0.6, "plain": 0.4}
"""Share of cases in which each mistake is made. `first`: takes a name from the first passage, whatever it says.
`vague`: searches for a name without a relation. `turned`: follows the relations in the order of the question, which is
the wrong way round. `early`: answers one step too early. Above one half a mistake is a habit, so greedy decoding has
it, too. `plain`: answers without the tags.
"""
PER_WORLD = 100
"""Questions per world. With more, the model would learn the names by heart instead of reading them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    question: Question
    messages: tuple[dict[str, Any], ...]
    """The conversation as the model reads it: system, user, then assistant and tool in turn."""
    possible: Mapping[str, int]
    """How often each mistake was possible."""
    slips: Mapping[str, int]
    """How often it was made."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Demonstration]:
    """Conversations on tasks of the split `train`, none of them from `tasks`. `perfect`: without mistakes."""
    shares = {} if perfect else SLIPS
    return [
        _demonstrate(random.Random(f"demonstration-{seed}-{index}"), shares, world=index // PER_WORLD)
        for index in range(count)
    ]


class _Demonstrator:
    """Makes the decisions, and counts the mistakes."""

    def __init__(self, rng: random.Random, shares: Mapping[str, float]) -> None:
        self._rng = rng
        self._shares = shares
        self.possible = dict.fromkeys(SLIPS, 0)
        self.slips = dict.fromkeys(SLIPS, 0)

    def slipped(self, kind: str) -> bool:
        self.possible[kind] += 1
        made = self._rng.random() < self._shares.get(kind, 0.0)
        self.slips[kind] += made
        return made

    def chain(self, question: Question) -> tuple[str, ...]:
        chain = question.chain[::-1] if self.slipped("turned") else question.chain
        return chain[:-1] if self.slipped("early") else chain

    def query(self, relation: str, name: str) -> str:
        return f"about {name}" if self.slipped("vague") else query(relation, name)

    def reading(self, passages: list[Passage], relation: str, name: str) -> str:
        """The name to search for next. If no passage states the fact, it is a name from the first passage."""
        right = [
            passage.value
            for passage in passages
            if (passage.mood, passage.relation, passage.owner) == ("is", relation, name)
        ]
        if self.slipped("first") or not right:
            return next((_besides(name, passage) for passage in passages), name)
        return right[0]

    def answer(self, name: str) -> str:
        return f"it is {name}" if self.slipped("plain") else f"<answer> {name} </answer>"


def _demonstrate(rng: random.Random, shares: Mapping[str, float], *, world: int) -> Demonstration:
    question = random_question(rng, "train", world_number=world)
    library = library_of({"world": question.world})
    demonstrator = _Demonstrator(rng, shares)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": question.text},
    ]
    name = question.names[0]
    for place, relation in enumerate(demonstrator.chain(question)):
        arguments = {"query": demonstrator.query(relation, name)}
        found = library.search(arguments["query"])
        function = {"name": "search", "arguments": json.dumps(arguments)}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"call_{place}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "content": found})
        name = demonstrator.reading(_passages(question.world, found), relation, name)
    messages.append({"role": "assistant", "content": demonstrator.answer(name)})
    return Demonstration(
        question=question, messages=tuple(messages), possible=demonstrator.possible, slips=demonstrator.slips
    )


def _passages(world: str, found: str) -> list[Passage]:
    """The passages behind the lines of a search result."""
    return [] if found == NOTHING else [_by_line(world)[line] for line in found.split("\n")]


@lru_cache(maxsize=CACHED)
def _by_line(world: str) -> Mapping[str, Passage]:
    return {f"- {passage.text}": passage for passage in build_world(world).passages}


def _besides(name: str, passage: Passage) -> str:
    """The other name in a passage."""
    return passage.owner if passage.value == name else passage.value
