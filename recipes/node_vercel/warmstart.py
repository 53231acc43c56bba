"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

from pathlib import Path
from typing import Any

from demonstrations import INSTRUCTIONS, TOOLS, Demonstration, demonstrations
from tasks import NUMBERS

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import add_phrases, build_tokenizer, tools_phrase
from lightningrl.trainer.imitation import Example, answers

VOCABULARY = 420
BEGIN = "<|im_start|>assistant\n"
PHRASES = (
    BEGIN,
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    '<tool_call>\n{"name": "look_up", "arguments": {"name": "',
    '"}}\n</tool_call>',
    "<|im_start|>user\n<tool_response>\n",
    "\n</tool_response>",
    *NUMBERS,
    *(f" {number}" for number in NUMBERS),
)
"""What every conversation has, and every number, one token each: so an answer is two to five tokens long."""


def tokenizer_for(demonstrated: list[Demonstration]) -> Any:
    """Knows every word of the demonstrations and every phrase. The tool's description is one, too."""
    texts = [text_of(message) for demonstration in demonstrated for message in demonstration.messages]
    tokenizer = build_tokenizer(texts, vocab_size=VOCABULARY)
    add_phrases(tokenizer, (*PHRASES, tools_phrase(tokenizer, TOOLS, system=INSTRUCTIONS)))
    return tokenizer


def text_of(message: dict[str, Any]) -> str:
    return message.get("content") or message["tool_calls"][0]["function"]["arguments"]


def ids_of(messages: list[dict[str, Any]], tokenizer: Any, *, go_on: bool = False) -> list[int]:
    """A conversation as the model reads it; with `go_on`, up to where it is to answer."""
    return tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=go_on, return_dict=False)


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each answer of the conversation, given all that came before it."""
    ids = ids_of(list(demonstration.messages), tokenizer)
    return answers(ids, begin=tokenizer.convert_tokens_to_ids(BEGIN), end=tokenizer.eos_token_id)


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=lambda shown: tokenizer_for(list(shown[:2000])),
    examples=examples,
    count=6000,
    steps=800,
    batch=32,
    peak=4e-3,
    hidden=80,
    shape={"head_size": 20, "intermediate": 224},
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
