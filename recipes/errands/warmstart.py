"""What is the model shown before it learns from reward, and in which tokens?

`lightningrl warmstart recipe.toml` makes the folder `warmstart` from it.
"""

import json
from typing import Any

from agent import SYSTEM
from demonstrations import demonstrations
from house import TOOLS

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase

VOCABULARY = 420
PHRASES = (
    BEGIN,
    '<tool_call>\n{"name": "',
    '", "arguments": {"',
    '": "',
    "}}\n</tool_call>",
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
)
"""What every conversation has, one token each: so an answer is some nine tokens long."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages, "tools": TOOLS} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    """Knows every word and every phrase. The tools' description is one, too."""
    said = [message.get("content") or text_of(message) for one in shown[:2000] for message in one["messages"]]
    texts = [*said, *(json.dumps(tool) for tool in TOOLS), "system user assistant"]
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def text_of(message: dict[str, Any]) -> str:
    """A call of a tool as the model writes it."""
    function = message["tool_calls"][0]["function"]
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
