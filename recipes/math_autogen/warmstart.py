"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import json
from pathlib import Path
from typing import Any

from agent import SYSTEM
from demonstrations import TOOLS, Demonstration, demonstrations

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers

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
"""Two digits are one token, the same in a story, in a call and in a result; never with the space before. So a number of a story is copied in one
look, and a result below 10,000 in two. Of single digits every second one would have to be found again by what was written before it, which is
not enough where 37 and 34 are in one story; of whole numbers each would be too rare to be learnt."""


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts`, every phrase and two digits at a time. What is to be done, and what with, is a phrase each, too."""
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, *NUMBERS, SYSTEM, tools_phrase(tokenizer, TOOLS, system=SYSTEM)))
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it. Who reflects is shown no tools."""
    made = answers(demonstration.messages, tokenizer, tools=TOOLS)
    return [*made[:-1], answers(demonstration.messages, tokenizer)[-1]] if demonstration.reflects else made


def text_of(message: dict[str, Any]) -> str:
    """What is said, or asked of the calculator."""
    return message.get("content") or json.loads(message["tool_calls"][0]["function"]["arguments"])["expression"]


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=lambda shown: tokenizer_for([*(text_of(m) for d in shown[:2000] for m in d.messages), json.dumps(TOOLS), "system user assistant"]),
    examples=examples,
    count=80000,
    reading=500,
    reading_prompts=True,
    steps=1200,
    layers=4,
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
