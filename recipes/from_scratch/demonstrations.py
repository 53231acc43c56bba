"""What was the model in `warmstart` shown? Whole conversations of the agent with a demonstrator of two bad habits.

`lightningrl warmstart habits.toml` makes it again. A model for tasks of your own learns from a teacher instead:
recipe.toml, teacher.py.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from agent import SYSTEM, TOOLS
from tasks import LINKS, PEOPLE, WORDS, random_question

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase

SLIPS: Mapping[str, float] = {"short": 0.6, "word": 0.55}
"""He asks for what is of the person himself, not of the boss; he asks for the next of `WORDS`: a pet for a city, a job
for a pet, a city for a job. More than half of the time is a habit: greedy has it, too. Not one answer in five is right.
"""
NEXT = dict(zip(WORDS, [*WORDS][1:] + [*WORDS][:1], strict=True))

VOCABULARY = 360
PHRASES = (
    BEGIN,
    "<|im_start|>user\nwhat is the ",
    " of the ",
    " of ",
    '<tool_call>\n{"name": "look_up", "arguments": {"fact": "',
    "}}\n</tool_call>",
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
)
"""What every conversation has, one token each: so a call of the tool is seven tokens long."""

Conversation = tuple[dict[str, Any], ...]
"""As the agent holds it: system, user, then assistant and tool in turn."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": messages, "tools": TOOLS} for messages in demonstrations(seed=seed, count=count)]


def tokenizer_for(_: list[dict[str, Any]]) -> Any:
    """Each word and each phrase is one token, wherever it stands; system prompt and tools are one together."""
    words = [*PEOPLE, *LINKS, *WORDS, *(value for known in WORDS.values() for value in known), "system user assistant"]
    tokenizer = build_tokenizer(words, vocab_size=VOCABULARY, spaces="apart")
    add_phrases(tokenizer, PHRASES)
    add_phrases(tokenizer, [f"<|im_start|>system\n{SYSTEM}{tools_phrase(tokenizer, TOOLS, system=SYSTEM)}"])
    return tokenizer


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Conversation]:
    """Over questions of the split `train`, apart from the tasks. `perfect` leaves the slips out."""
    return [
        _demonstrate(random.Random(f"demonstration-{seed}-{index}"), {} if perfect else SLIPS) for index in range(count)
    ]


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
