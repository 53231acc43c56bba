"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

from pathlib import Path
from typing import Any

from demonstrations import Demonstration, demonstrations

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import build_tokenizer
from lightningrl.trainer.imitation import Example

VOCABULARY = 1300
ROLES = tuple({"content": role} for role in ("system", "user", "assistant"))
"""Words of the chat template, so that each is one token."""


def examples(demonstration: Demonstration, tokenizer: Any) -> list[Example]:
    """One for each query of the conversation, given all that came before it."""
    made: list[Example] = []
    for index, message in enumerate(demonstration.messages):
        if message["role"] != "assistant":
            continue
        history = list(demonstration.messages[:index])
        prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        made.append(Example(prompt_ids=prompt, completion_ids=[*tokenizer(message["content"])["input_ids"], tokenizer.eos_token_id]))
    return made


RECIPE = Warmstart(
    folder=Path(__file__).parent / "warmstart",
    demonstrations=demonstrations,
    tokenizer_for=lambda shown: build_tokenizer((m["content"] for d in shown for m in (*d.messages, *ROLES)), vocab_size=VOCABULARY),
    examples=examples,
    count=16000,
    steps=1400,
)

if __name__ == "__main__":
    main(RECIPE, about=__doc__)
