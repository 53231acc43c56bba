"""What is the model shown before it learns from reward? Whole conversations of the agent with a demonstrator of two bad habits."""

import json
import random
from collections.abc import Mapping
from typing import Any

from agent import SYSTEM
from questions import WORDS, random_question

SLIPS: Mapping[str, float] = {"short": 0.6, "word": 0.55}
"""He asks for what is of the person himself, not of the boss; he asks for the next of `WORDS`: a pet for a city, a job for a pet, a city for a job.
More than half of the time is a habit: greedy has it, too. Not one answer in five is right."""
NEXT = dict(zip(WORDS, [*WORDS][1:] + [*WORDS][:1], strict=True))

Conversation = tuple[dict[str, Any], ...]
"""As the agent holds it: system, user, then assistant and tool in turn."""


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Conversation]:
    """Over questions of the split `train`, with other facts than in tasks.jsonl. `perfect` leaves the slips out."""
    return [_demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS) for index in range(count)]


def _demonstrate(rng: random.Random, slips: Mapping[str, float]) -> Conversation:
    question = random_question(rng, heldout=False)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    found = question.person
    if rng.random() >= slips.get("short", 0):
        found = _look_up(messages, question.facts, f"{question.link} of {found}")
    word = NEXT[question.word] if rng.random() < slips.get("word", 0) else question.word
    found = _look_up(messages, question.facts, f"{word} of {found}")
    return (*messages, {"role": "assistant", "content": found})


def _look_up(messages: list[dict[str, Any]], facts: Mapping[str, str], fact: str) -> str:
    """One call of the tool, and what it says."""
    name = f"call_{len(messages)}"
    function = {"name": "look_up", "arguments": json.dumps({"fact": fact})}
    messages.append({"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": function}]})
    messages.append({"role": "tool", "tool_call_id": name, "content": facts[fact]})
    return facts[fact]
