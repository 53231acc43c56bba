"""How does a model learn from demonstrations, before it learns from reward?

Supervised learning is the policy gradient with an advantage of 1 on every token, so it goes through the same forest and the same trainer.
"""

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.models.dense import DenseModel
from lightningrl.models.load import export_folder
from lightningrl.models.tiny import BEGIN
from lightningrl.trainer.base import Trainer
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Transition

WARMUP = 50
"""Steps over which the learning rate rises."""
REPORT_EVERY = 50
"""Steps between two losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One answer that is to be imitated."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    """Its end token included."""


def imitator(model: DenseModel, *, tokenizer: Any, threads: int) -> LocalTrainer:
    """A trainer whose advantages of 1 are supervised learning."""
    config, loss = TrainerConfig.model_validate({"threads": threads}), LossConfig.model_validate({"name": "pg"})
    return LocalTrainer(model, config=config, loss=loss, export=partial(export_folder, tokenizer=tokenizer))


def answers(messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, tools: Sequence[Any] | None = None) -> list[Example]:
    """One for each answer of a conversation, given all that came before it. The tokenizer is one of `models.tiny`, with `BEGIN` among its phrases."""
    ids: list[int] = tokenizer.apply_chat_template(list(messages), tools=tools, return_dict=False)
    begin, end = tokenizer.convert_tokens_to_ids(BEGIN), tokenizer.eos_token_id
    begins = [place + 1 for place, token in enumerate(ids) if token == begin]
    return [Example(prompt_ids=ids[:place], completion_ids=ids[place : ids.index(end, place) + 1]) for place in begins]


def whole(examples: Sequence[Example], *, prompt: bool) -> Example:
    """All of a conversation after its first prompt, or with it, as one example. An answer for which the prompt was changed is left out."""
    asked = examples[0].prompt_ids
    last = next(example for example in reversed(examples) if example.prompt_ids[: len(asked)] == asked)
    ids, begin = [*last.prompt_ids, *last.completion_ids], 1 if prompt else len(asked)
    return Example(prompt_ids=ids[:begin], completion_ids=ids[begin:])


def imitate(
    trainer: Trainer, conversations: Sequence[Sequence[Example]], *, peak: float, steps: int, size: int, seed: int, seconds: float = math.inf
) -> Iterator[tuple[int, float]]:
    """Learn from `size` conversations a step, each token of a step alike, and yield (step, mean loss of late) now and then. The learning rate rises
    to `peak`, then falls linearly to zero, which it reaches after `steps` or `seconds`, whichever is over first. For an `imitator`.
    """
    lessons = [_lessons(examples, f"demonstration-{index}") for index, examples in enumerate(conversations)]
    losses: list[float] = []
    began = time.perf_counter()
    for step, batch in enumerate(_batches(lessons, size, random.Random(seed))):
        left = min(1 - step / steps, 1 - (time.perf_counter() - began) / seconds)
        if left <= 0:
            break
        losses.append(trainer.forward_backward(build_forest(batch)).metrics["loss/value"])
        trainer.optim_step(learning_rate=peak * min((step + 1) / WARMUP, left))
        if (step + 1) % REPORT_EVERY == 0:
            yield step + 1, float(np.mean(losses[-REPORT_EVERY:]))


def _lessons(examples: Sequence[Example], name: str) -> list[Lesson]:
    made: list[Lesson] = []
    for index, example in enumerate(examples):
        count = len(example.completion_ids)
        transition = Transition(
            call_id=f"{name}/{index}",
            parent_call_id=None,
            agent="demonstrator",
            policy_version=0,
            prompt_ids=np.array(example.prompt_ids, np.int32),
            completion_ids=np.array(example.completion_ids, np.int32),
            logprobs=np.zeros(count, np.float32),
            reward=None,
        )
        made.append(Lesson(rollout_id=name, group_id=name, transition=transition, advantages=np.ones(count, np.float32), weights=np.ones(count)))
    return made


def _batches(conversations: Sequence[list[Lesson]], size: int, rng: random.Random) -> Iterator[list[Lesson]]:
    """Endless; every conversation once before any comes again."""
    while True:
        order = rng.sample(range(len(conversations)), len(conversations))
        for start in range(0, len(order) - size + 1, size):
            chosen = [lesson for i in order[start : start + size] for lesson in conversations[i]]
            total = sum(len(lesson.weights) for lesson in chosen)
            yield [replace(lesson, weights=lesson.weights / total) for lesson in chosen]
