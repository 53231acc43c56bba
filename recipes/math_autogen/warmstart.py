"""What is the model shown before it learns from reward, and in which tokens?

`lightningrl warmstart recipe.toml` makes the folder `warmstart` from it.
"""

import json
from typing import Any

from agent import SYSTEM
from demonstrations import TOOLS, Demonstration, demonstrations

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase

VOCABULARY = 560
PHRASES = (
    BEGIN,
    "<|im_start|>user\n",
    "<|im_start|>system\n",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
    *(f" {sign} " for sign in "+-*/"),
)
"""What every conversation has, one token each: so an answer is some eight tokens long."""
NUMBERS = tuple(f"{number:02d}" for number in range(100))
"""Two digits are one token, the same in a story, in a call and in a result; never with the space before. So a number of
a story is copied in one look, and a result below 10,000 in two. Of single digits every second one would have to be
found again by what was written before it, which is not enough where 37 and 34 are in one story; of whole numbers each
would be too rare to be learnt.
"""


def conversations(*, seed: int, count: int) -> list[list[dict[str, Any]]]:
    return [conversations_of(demonstration) for demonstration in demonstrations(seed=seed, count=count)]


def conversations_of(demonstration: Demonstration) -> list[dict[str, Any]]:
    """Who reflects is shown no tools: the last answer is then in a conversation of its own."""
    messages = list(demonstration.messages)
    if not demonstration.reflects:
        return [{"messages": messages, "tools": TOOLS}]
    before = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages[:-1]]
    return [{"messages": messages[:-1], "tools": TOOLS}, {"messages": [*before, messages[-1]]}]


def tokenizer_for(shown: list[list[dict[str, Any]]]) -> Any:
    """Knows every word, every phrase and two digits at a time. What is to be done, and what with, is a phrase each,
    too.
    """
    said = [text_of(message) for one in shown[:2000] for message in _messages(one)]
    tokenizer = build_tokenizer([*said, json.dumps(TOOLS), "system user assistant"], vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, *NUMBERS, SYSTEM, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def _messages(conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each once: a second conversation has them all."""
    return conversations[-1]["messages"]


def text_of(message: dict[str, Any]) -> str:
    """What is said, or asked of the calculator."""
    return message.get("content") or json.loads(message["tool_calls"][0]["function"]["arguments"])["expression"]
