"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import json
from pathlib import Path
from typing import Any

from agent import SYSTEM
from demonstrations import Demonstration, demonstrations
from house import TOOLS

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers

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


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts` and every phrase. The tools' description is one, too."""
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    return answers(demonstration.messages, tokenizer, tools=TOOLS)


def text_of(message: dict[str, Any]) -> str:
    """An answer as the model writes it."""
    if not message.get("tool_calls"):
        return message["content"]
    function = message["tool_calls"][0]["function"]
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=lambda shown: tokenizer_for(
        [*(m.get("content") or text_of(m) for d in shown[:2000] for m in d.messages), *(json.dumps(tool) for tool in TOOLS), "system user assistant"]
    ),
    examples=examples,
    count=4000,
    steps=1000,
    batch=24,
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
