"""Demonstrations behind the model in `warmstart`: conversations of the agent with a demonstrator with two bad habits.

`lightningrl warmstart habits.toml` makes the model again. For tasks of your own, use a teacher instead: recipe.toml and
teacher.py.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from agent import SYSTEM, TOOLS
from tasks import LINKS, PEOPLE, WORDS, random_question

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase

SLIPS: Mapping[str, float] = {"short": 0.6, "word": 0.55}
"""Share of conversations with each slip. `short`: asks about the person, not about the boss. `word`: asks for the next
of `WORDS`, e.g. a pet instead of a city. Above one half a slip is a habit, so greedy decoding has it, too. Fewer than
one answer in five is right.
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
"""Text of every conversation, one token each. A tool call is seven tokens long."""

Conversation = tuple[dict[str, Any], ...]
"""The conversation as the agent holds it: system, user, then assistant and tool in turn."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": messages, "tools": TOOLS} for messages in demonstrations(seed=seed, count=count)]


def tokenizer_for(_: list[dict[str, Any]]) -> Any:
    """Each word and each phrase is one token; the system prompt and the tools together are one, too."""
    words = [*PEOPLE, *LINKS, *WORDS, *(value for known in WORDS.values() for value in known), "system user assistant"]
    tokenizer = build_tokenizer(words, vocab_size=VOCABULARY, spaces="apart")
    add_phrases(tokenizer, PHRASES)
    add_phrases(tokenizer, [f"<|im_start|>system\n{SYSTEM}{tools_phrase(tokenizer, TOOLS, system=SYSTEM)}"])
    return tokenizer


def demonstrations(*, seed: int, count: int, perfect: bool = False) -> list[Conversation]:
    """Conversations on questions of the split `train`; none is among the tasks. `perfect`: without slips."""
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
    """Append a tool call and its result to `messages`; return the result."""
    name = f"call_{len(messages)}"
    function = {"name": "look_up", "arguments": json.dumps({"fact": fact})}
    messages.append({"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": function}]})
    messages.append({"role": "tool", "tool_call_id": name, "content": facts[fact]})
    return facts[fact]
