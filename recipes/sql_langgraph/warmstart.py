"""The warm start's demonstrations and tokenizer: `lightningrl warmstart recipe.toml` makes the folder `warmstart`."""

from typing import Any

from demonstrations import demonstrations

from lightningrl.models.tiny import build_tokenizer

VOCABULARY = 1300
ROLES = tuple({"content": role} for role in ("system", "user", "assistant"))
"""The role names of the chat template, so that each is one token."""


def conversations(*, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"messages": d.messages} for d in demonstrations(seed=seed, count=count)]


def tokenizer_for(shown: list[dict[str, Any]]) -> Any:
    return build_tokenizer(
        (message["content"] for one in shown for message in (*one["messages"], *ROLES)), vocab_size=VOCABULARY
    )
