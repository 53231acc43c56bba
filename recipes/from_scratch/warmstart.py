"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent import SYSTEM, TOOLS
from demonstrations import Conversation, demonstrations
from questions import LINKS, PEOPLE, WORDS

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import BEGIN, add_phrases, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers

VOCABULARY = 360
PHRASES = (
    BEGIN,
    "<|im_start|>user\nwhat is the ",
    " of the ",
    " of ",
    '<tool_call>\n{"name": "look_up", "arguments": {"fact": "',
    "}}\n</tool_call>",
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
)
"""What every conversation has, one token each: so a call of the tool is seven tokens long."""


def tokenizer_for(_: Sequence[Conversation]) -> Any:
    """Each word and each phrase is one token, wherever it stands; system prompt and tools are one together."""
    words = [*PEOPLE, *LINKS, *WORDS, *(value for known in WORDS.values() for value in known), "system user assistant"]
    tokenizer = build_tokenizer(words, vocab_size=VOCABULARY, spaces="apart")
    add_phrases(tokenizer, PHRASES)
    add_phrases(tokenizer, [f"<|im_start|>system\n{SYSTEM}{tools_phrase(tokenizer, TOOLS, system=SYSTEM)}"])
    return tokenizer


def examples(conversation: Conversation, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    return answers(conversation, tokenizer, tools=TOOLS)


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=tokenizer_for,
    examples=examples,
    count=6000,
    steps=250,
    batch=24,
    peak=4e-3,
    hidden=64,
    shape={"head_size": 16, "intermediate": 128},
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
