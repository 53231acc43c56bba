"""How does a model learn from demonstrations, before it learns from reward?

Supervised learning is the policy gradient with an advantage of 1 on every token, so it goes through the same forest and the same trainer.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightningrl.data.forest import Lesson, build_forest
from lightningrl.trainer.base import Trainer
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


def imitate(trainer: Trainer, conversations: Sequence[Sequence[Example]], *, peak: float, steps: int, size: int, seed: int) -> Iterator[float]:
    """Learn from `size` conversations a step, each token of a step alike, and yield a loss now and then. The learning rate rises to `peak`, then
    falls linearly to zero. Made for a trainer whose loss is `pg`.
    """
    lessons = [_lessons(examples, f"demonstration-{index}") for index, examples in enumerate(conversations)]
    losses: list[float] = []
    for step, batch in zip(range(steps), _batches(lessons, size, random.Random(seed)), strict=False):
        losses.append(trainer.forward_backward(build_forest(batch)).metrics["loss/value"])
        trainer.optim_step(learning_rate=peak * min((step + 1) / WARMUP, 1 - step / steps))
        if (step + 1) % REPORT_EVERY == 0:
            yield float(np.mean(losses[-REPORT_EVERY:]))


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
