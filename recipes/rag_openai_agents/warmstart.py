"""The warm start's demonstrations and tokenizer: `lightningrl warmstart recipe.toml` makes the folder `warmstart`."""

from typing import Any

from agent import INSTRUCTIONS
from demonstrations import demonstrations
from names import PARTS
from search import NOTHING, SCHEMA

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase

VOCABULARY = 1200
TOOLS = [
    {
        "type": "function",
        "function": {"name": "search", "description": "look up", "parameters": SCHEMA, "strict": False},
    }
]
"""The tool as the model reads it, with local search or MCP."""
PHRASES = (
    BEGIN,
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n-",
    "\n</tool_response>",
    "\n-",
    "<answer>",
    " </answer>",
)
"""Text of every conversation, one token each. A search is about 6 tokens long, its result about 30."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages, "tools": TOOLS} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    """Each word, each part of a name and each phrase is one token; the tool's description is one, too."""
    said = [text_of(message) for one in shown[:3000] for message in one["messages"]]
    parts = [part for kind in PARTS.values() for both in kind for part in both.split()]
    tokenizer = build_tokenizer([*said, NOTHING, *parts], vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)))
    return tokenizer


def text_of(message: dict[str, Any]) -> str:
    return message.get("content") or message["tool_calls"][0]["function"]["arguments"]
