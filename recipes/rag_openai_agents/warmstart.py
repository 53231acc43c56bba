"""What is the model shown before it learns from reward, and in which tokens?

`lightningrl warmstart recipe.toml` makes the folder `warmstart` from it.
"""

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
"""As the model is told of it, whichever way the agent comes by it."""
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
"""What every conversation has, one token each: so a search is some six tokens long, and what is found about 30."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages, "tools": TOOLS} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    """Knows every word, every part of a name and every phrase. The tool's description is one, too."""
    said = [text_of(message) for one in shown[:3000] for message in one["messages"]]
    parts = [part for kind in PARTS.values() for both in kind for part in both.split()]
    tokenizer = build_tokenizer([*said, NOTHING, *parts], vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)))
    return tokenizer


def text_of(message: dict[str, Any]) -> str:
    return message.get("content") or message["tool_calls"][0]["function"]["arguments"]
