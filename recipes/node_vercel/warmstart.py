"""The warm start's demonstrations and tokenizer: `lightningrl warmstart recipe.toml` makes the folder `warmstart`."""

from typing import Any

from demonstrations import INSTRUCTIONS, TOOLS, demonstrations
from tasks import DEEDS, FIELDS, NUMBERS, PEOPLE, THINGS

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase

VOCABULARY = 400
PHRASES = (
    BEGIN,
    "<|im_start|>user\n",
    " asks: ",
    " of what ",
    '<tool_call>\n{"name": "look_up", "arguments": {"name": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
)
"""Text of every conversation, one token each. An answer is two to six tokens long."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages, "tools": TOOLS} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(_: list[dict[str, Any]]) -> Any:
    """Each word, thing, number and phrase is one token; instructions and tools together are one, too."""
    words = [*PEOPLE, *DEEDS, *FIELDS, "no record of", "system user assistant"]
    tokenizer = build_tokenizer(words, vocab_size=VOCABULARY, spaces="apart")
    add_phrases(tokenizer, (*PHRASES, *THINGS, *NUMBERS))
    add_phrases(tokenizer, [f"<|im_start|>system\n{INSTRUCTIONS}{tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)}"])
    return tokenizer
