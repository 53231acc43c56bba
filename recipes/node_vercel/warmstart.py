"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demonstrations import INSTRUCTIONS, TOOLS, Demonstration, demonstrations
from tasks import DEEDS, FIELDS, NUMBERS, PEOPLE, THINGS

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers

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
"""What every conversation has, one token each: so an answer is two to six tokens long."""


def tokenizer_for(_: Sequence[Demonstration]) -> Any:
    """Each word, thing, number and phrase is one token, wherever it stands; instructions and tools are one together."""
    words = [*PEOPLE, *DEEDS, *FIELDS, "no record of", "system user assistant"]
    tokenizer = build_tokenizer(words, vocab_size=VOCABULARY, spaces="apart")
    add_phrases(tokenizer, (*PHRASES, *THINGS, *NUMBERS))
    add_phrases(tokenizer, [f"<|im_start|>system\n{INSTRUCTIONS}{tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)}"])
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    return answers(demonstration.messages, tokenizer, tools=TOOLS)


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=tokenizer_for,
    examples=examples,
    count=8000,
    steps=800,
    batch=24,
    peak=4e-3,
    hidden=64,
    shape={"head_size": 16, "intermediate": 128},
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
