"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

from pathlib import Path
from typing import Any

from agent import INSTRUCTIONS
from demonstrations import Demonstration, demonstrations
from names import PARTS
from search import NOTHING, SCHEMA

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers

VOCABULARY = 1200
TOOLS = [{"type": "function", "function": {"name": "search", "description": "look up", "parameters": SCHEMA, "strict": False}}]
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


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts`, every part of a name and every phrase. The tool's description is one, too."""
    parts = [part for kind in PARTS.values() for both in kind for part in both.split()]
    tokenizer = build_tokenizer([*texts, *parts], vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)))
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    return answers(demonstration.messages, tokenizer, tools=TOOLS)


def text_of(message: dict[str, Any]) -> str:
    return message.get("content") or message["tool_calls"][0]["function"]["arguments"]


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=lambda shown: tokenizer_for([*(text_of(m) for d in shown[:3000] for m in d.messages), NOTHING]),
    examples=examples,
    count=60000,
    reading=400,
    steps=2000,
    layers=4,
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
