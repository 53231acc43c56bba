"""Questions that take two look-ups. Each question has facts of its own, so only looking up helps.

what is the city of the boss of ann?        boss of ann → ben, city of ben → oslo
"""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PEOPLE = ("ann", "ben", "cleo", "dan", "eva", "fred", "gina", "hugo")
LINKS = ("boss", "friend", "aunt")
"""Relations from one person to another."""
WORDS: Mapping[str, tuple[str, ...]] = {
    "city": ("oslo", "rome", "lima", "cairo", "paris", "delhi"),
    "pet": ("cat", "dog", "owl", "fox", "hen", "goat"),
    "job": ("cook", "pilot", "judge", "baker", "nurse", "clerk"),
}
"""The subjects of questions, and their possible answers."""
HELDOUT_SHARE = 5
"""One question in this many is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    person: str
    link: str
    word: str
    facts: Mapping[str, str]
    """`boss of ann` → `ben`, and so on."""

    @property
    def text(self) -> str:
        return f"what is the {self.word} of the {self.link} of {self.person}?"

    @property
    def answer(self) -> str:
        return self.facts[f"{self.word} of {self.facts[f'{self.link} of {self.person}']}"]


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """Other tasks for every seed. Yours may also be the lines of a file: `source = "tasks.jsonl"` in recipe.toml."""
    drawn = [
        random_question(random.Random(f"{split}-{seed}-{index}"), heldout=split == "heldout") for index in range(count)
    ]
    return [
        {"input": {"question": question.text, "facts": dict(question.facts), "answer": question.answer}}
        for question in drawn
    ]


def random_question(rng: random.Random, *, heldout: bool) -> Question:
    """A question of the requested split. Splits hold out combinations of words, never a word."""
    while True:
        question = _draw(rng)
        if is_heldout(question.text) == heldout:
            return question


def is_heldout(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELDOUT_SHARE == 0


def _draw(rng: random.Random) -> Question:
    """Four people whose facts all differ: a wrong path never leads to the right answer."""
    person, *others = people = rng.sample(PEOPLE, 1 + len(LINKS))
    facts = {f"{link} of {person}": other for link, other in zip(LINKS, others, strict=True)}
    for word, known in WORDS.items():
        facts |= {
            f"{word} of {name}": value for name, value in zip(people, rng.sample(known, len(people)), strict=True)
        }
    return Question(person=person, link=rng.choice(LINKS), word=rng.choice(list(WORDS)), facts=facts)
