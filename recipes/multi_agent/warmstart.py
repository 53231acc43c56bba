"""The warm start's demonstrations and tokenizer: `lightningrl warmstart recipe.toml` makes the folder `warmstart`.

One model learns all three roles. Each policy starts from it, and adapters have it as their base.
"""

from typing import Any

from demonstrations import demonstrations

from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer

VOCABULARY = 400
PHRASES = (BEGIN, "<|im_start|>user\n", "<|im_start|>system\n")
"""Markers of the chat template, one token each."""
NUMBERS = tuple(space + str(number) for number in range(40) for space in ("", " "))
"""One token each: the task is to learn sums, not spelling."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    """Each word, each phrase and each number is one token."""
    tokenizer = build_tokenizer(
        [message["content"] for one in shown[:3000] for message in one["messages"]], vocab_size=VOCABULARY
    )
    add_phrases(tokenizer, (*PHRASES, *NUMBERS))
    return tokenizer
