"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
python warmstart.py --seed 1 --out other   makes another one
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from demonstrations import Demonstration, demonstrations

from lightningrl.models.load import load_model, load_tokenizer
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.trainer.imitation import Example, imitate, imitator

VOCABULARY = 1300
PEAK = 3e-3
"""The highest learning rate."""
PEAK_AGAIN = 1e-3
"""The same, for a model that was trained before."""


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


def main() -> None:
    arguments = parser().parse_args()
    keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    shown = demonstrations(seed=arguments.seed, count=arguments.demonstrations, perfect=arguments.perfect)
    if arguments.base is None:
        tokenizer = build_tokenizer((m["content"] for d in shown for m in (*d.messages, *ROLES)), vocab_size=VOCABULARY)
        model = build_model(len(tokenizer), seed=arguments.seed, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    else:
        tokenizer, model = load_tokenizer(str(arguments.base)), load_model(str(arguments.base))
    conversations = [examples(demonstration, tokenizer) for demonstration in shown]
    trainer = imitator(model, tokenizer=tokenizer, threads=arguments.threads)
    settings = {
        "steps": arguments.steps,
        "seconds": arguments.seconds,
        "size": arguments.batch,
        "seed": arguments.seed if arguments.order is None else arguments.order,
    }
    began = time.perf_counter()
    for step, loss in imitate(trainer, conversations, peak=PEAK if arguments.base is None else PEAK_AGAIN, **settings):
        print(f"step {step}  loss {loss:.3f}  {time.perf_counter() - began:.0f} s", flush=True)
    trainer.publish(arguments.out)
    print(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters in {arguments.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--order", type=int, help="seed of the order in which demonstrations come; default: --seed")
    made.add_argument("--steps", type=int, default=1400)
    made.add_argument("--seconds", type=float, default=math.inf, help="stop after this much time")
    made.add_argument("--batch", type=int, default=48, help="conversations in a step")
    made.add_argument("--demonstrations", type=int, default=16000)
    made.add_argument("--perfect", action="store_true", help="leave the mistakes out: what the model could learn at best")
    made.add_argument("--continue", dest="base", type=Path, help="go on from a model folder: the control that reinforcement learning is held against")
    made.add_argument("--threads", type=int, default=1, help="with 1, weights are the same bit for bit on any number of cores")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "warmstart")
    return made


ROLES = tuple({"content": role} for role in ("system", "user", "assistant"))
"""Words of the chat template, so that each is one token."""

if __name__ == "__main__":
    main()
