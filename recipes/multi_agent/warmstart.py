"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

    python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
    python warmstart.py --seed 1 --out other   makes another one

All three roles are learnt by one model: it is what each policy starts from, and the base under their adapters.
"""

from pathlib import Path
from typing import Any

from demonstrations import Demonstration, demonstrations

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer
from lightningrl.trainer.imitation import Example, answers

VOCABULARY = 400
PHRASES = (BEGIN, "<|im_start|>user\n", "<|im_start|>system\n")
"""Marks of the chat template, one token each."""
NUMBERS = tuple(space + str(number) for number in range(40) for space in ("", " "))
"""One token each, too: what there is to learn is the sums, not how numbers are written."""


def tokenizer_for(texts: list[str]) -> Any:
    """Knows every word of `texts`, every phrase and every number."""
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, *NUMBERS))
    return tokenizer


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    return answers(demonstration.messages, tokenizer)


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=lambda shown: tokenizer_for([message["content"] for d in shown[:3000] for message in d.messages]),
    examples=examples,
    count=6000,
    steps=800,
    peak=4e-3,
    hidden=80,
    shape={"head_size": 20, "intermediate": 224},
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
