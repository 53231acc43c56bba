"""How are the weights made that training starts from? A tokenizer and a tiny model, made on the spot, and a short SFT on demonstrations.

    python warmstart.py                        rebuilds the folder `warmstart` that recipe.toml names
    python warmstart.py --seed 1 --out other   makes another one

SFT is the policy gradient with an advantage of 1 on every token, so it goes through the same forest and the same trainer as RL.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demonstrations import Demonstration, demonstrations

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Transition

VOCABULARY = 1300
PEAK = 3e-3
"""Learning rate, after WARMUP steps; it falls linearly to zero."""
PEAK_AGAIN = 1e-3
"""The same, for a model that was trained before."""
WARMUP = 50


def lessons(demonstration: Demonstration, tokenizer: Any, name: str) -> list[Lesson]:
    """One for each query of the conversation, given all that came before it. Weights are left at 1 a token."""
    made: list[Lesson] = []
    for index, message in enumerate(demonstration.messages):
        if message["role"] != "assistant":
            continue
        history = list(demonstration.messages[:index])
        prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
        completion = [*tokenizer(message["content"])["input_ids"], tokenizer.eos_token_id]
        transition = Transition(
            call_id=f"{name}/{index}",
            parent_call_id=None,
            agent="demonstrator",
            policy_version=0,
            prompt_ids=np.array(prompt, dtype=np.int32),
            completion_ids=np.array(completion, dtype=np.int32),
            logprobs=np.zeros(len(completion), dtype=np.float32),
            reward=None,
        )
        ones = np.ones(len(completion))
        made.append(Lesson(rollout_id=name, group_id=name, transition=transition, advantages=ones.astype(np.float32), weights=ones))
    return made


def batches(conversations: Sequence[list[Lesson]], size: int, rng: random.Random) -> Any:
    """Endless batches; every conversation once before any comes again. Each token of a batch counts the same."""
    while True:
        order = rng.sample(range(len(conversations)), len(conversations))
        for start in range(0, len(order) - size + 1, size):
            chosen = [lesson for i in order[start : start + size] for lesson in conversations[i]]
            total = sum(len(lesson.weights) for lesson in chosen)
            yield [replace(lesson, weights=lesson.weights / total) for lesson in chosen]


def train(trainer: LocalTrainer, conversations: Sequence[list[Lesson]], *, peak: float, steps: int, seconds: float, size: int, seed: int) -> None:
    """For `steps` updates or `seconds`, whichever is over first; the learning rate falls to zero by then."""
    began = time.perf_counter()
    for step, batch in enumerate(batches(conversations, size, random.Random(seed))):
        elapsed = time.perf_counter() - began
        left = min(1 - step / steps, 1 - elapsed / seconds)
        if left <= 0:
            break
        found = trainer.forward_backward(build_forest(batch))
        trainer.optim_step(learning_rate=peak * min((step + 1) / WARMUP, left))
        if step % 50 == 49:
            print(f"step {step + 1}  loss {found.metrics['loss/value']:.3f}  {elapsed:.0f} s", flush=True)


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
    conversations = [lessons(demonstration, tokenizer, str(index)) for index, demonstration in enumerate(shown)]
    config = TrainerConfig.model_validate({"threads": arguments.threads})
    trainer = LocalTrainer(model, config=config, loss=LossConfig.model_validate({"name": "pg"}), export=partial(export_folder, tokenizer=tokenizer))
    peak = PEAK if arguments.base is None else PEAK_AGAIN
    train(trainer, conversations, peak=peak, steps=arguments.steps, seconds=arguments.seconds, size=arguments.batch, seed=arguments.seed)
    trainer.publish(arguments.out)
    print(f"{sum(p.numel() for p in model.hf.parameters()):,} parameters in {arguments.out}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
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
