"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

    python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
    python warmstart.py --seed 1 --out other   makes another one

All three roles are learnt by one model: it is what each policy starts from, and the base under their adapters.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from demonstrations import Demonstration, demonstrations

from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import add_phrases, build_model, build_tokenizer
from lightningrl.trainer.imitation import Example, answers, imitate, imitator

VOCABULARY = 400
BEGIN = "<|im_start|>assistant\n"
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
    ids: list[int] = tokenizer.apply_chat_template(list(demonstration.messages), return_dict=False)
    return answers(ids, begin=tokenizer.convert_tokens_to_ids(BEGIN), end=tokenizer.eos_token_id)


def main() -> None:
    arguments = parser().parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    shown = demonstrations(seed=arguments.seed, count=arguments.riddles, perfect=arguments.perfect)
    tokenizer = tokenizer_for([message["content"] for d in shown[:3000] for message in d.messages])
    size = {"hidden": 80, "layers": 3, "head_size": 20, "intermediate": 224}
    model = build_model(len(tokenizer), seed=arguments.seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **size)
    trainer = imitator(model, tokenizer=tokenizer, threads=arguments.threads)
    conversations = [examples(demonstration, tokenizer) for demonstration in shown]
    for _, loss in imitate(trainer, conversations, peak=arguments.peak, steps=arguments.steps, size=arguments.batch, seed=arguments.seed):
        print(f"loss {loss:.3f}", flush=True)
    trainer.publish(arguments.out)
    print(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters, {len(tokenizer)} tokens, in {arguments.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--steps", type=int, default=800)
    made.add_argument("--batch", type=int, default=48, help="conversations in a step")
    made.add_argument("--peak", type=float, default=4e-3, help="the highest learning rate")
    made.add_argument("--riddles", type=int, default=6000)
    made.add_argument("--perfect", action="store_true", help="leave the slips out: what the model could learn at best")
    made.add_argument("--threads", type=int, default=1, help="with 1, weights are the same bit for bit on any number of cores")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "warmstart")
    return made


if __name__ == "__main__":
    main()
