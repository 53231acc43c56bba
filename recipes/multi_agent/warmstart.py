"""What is the model shown before it learns from reward, and in which tokens?

`lightningrl warmstart recipe.toml` makes the folder `warmstart` from it.
All three roles are learnt by one model: it is what each policy starts from, and the base under their adapters.
"""

from typing import Any

from demonstrations import demonstrations

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer

VOCABULARY = 400
PHRASES = (BEGIN, "<|im_start|>user\n", "<|im_start|>system\n")
"""Marks of the chat template, one token each."""
NUMBERS = tuple(space + str(number) for number in range(40) for space in ("", " "))
"""One token each, too: what there is to learn is the sums, not how numbers are written."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    """Knows every word, every phrase and every number."""
    tokenizer = build_tokenizer(
        [message["content"] for one in shown[:3000] for message in one["messages"]], vocab_size=VOCABULARY
    )
    add_phrases(tokenizer, (*PHRASES, *NUMBERS))
    return tokenizer
