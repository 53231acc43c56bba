"""The warm start's demonstrations and tokenizer: `lightningrl warmstart recipe.toml` makes the folder `warmstart`."""

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
"""Text of every conversation, one token each. An answer is about eight tokens long."""
NUMBERS = tuple(f"{number:02d}" for number in range(100))
"""Two digits are one token, the same in a story, a call and a result, and never with the space before. A number of a
story is then copied in one step, and a result below 10,000 in two. With single digits, copying the second one would
need a match on the first, which is not enough if a story has both 37 and 34. Whole numbers would each be too rare.
"""


def conversations(*, seed: int, count: int) -> list[list[dict[str, Any]]]:
    return [conversations_of(demonstration) for demonstration in demonstrations(seed=seed, count=count)]


def conversations_of(demonstration: Demonstration) -> list[dict[str, Any]]:
    """A reflection has no tools, so it is a conversation of its own."""
    messages = list(demonstration.messages)
    if not demonstration.reflects:
        return [{"messages": messages, "tools": TOOLS}]
    before = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages[:-1]]
    return [{"messages": messages[:-1], "tools": TOOLS}, {"messages": [*before, messages[-1]]}]


def tokenizer_for(shown: list[list[dict[str, Any]]]) -> Any:
    """Each word, each phrase and each pair of digits is one token; so are the system prompt and the tools."""
    said = [text_of(message) for one in shown[:2000] for message in _messages(one)]
    tokenizer = build_tokenizer([*said, json.dumps(TOOLS), "system user assistant"], vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, *NUMBERS, SYSTEM, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def _messages(conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each message once: the last conversation has them all."""
    return conversations[-1]["messages"]


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, or the expression of a call."""
    return message.get("content") or json.loads(message["tool_calls"][0]["function"]["arguments"])["expression"]
