"""The warm start's demonstrations and tokenizer: `lightningrl warmstart recipe.toml` makes the folder `warmstart`."""

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
"""Text of every conversation, one token each. An answer is about nine tokens long."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages, "tools": TOOLS} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    """Each word and each phrase is one token; the description of the tools is one, too."""
    said = [message.get("content") or text_of(message) for one in shown[:2000] for message in one["messages"]]
    texts = [*said, *(json.dumps(tool) for tool in TOOLS), "system user assistant"]
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def text_of(message: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    function = message["tool_calls"][0]["function"]
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
