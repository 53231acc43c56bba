"""Supervised learning from demonstrations, before a model learns from reward.

It is the policy gradient with an advantage of 1 on every token. So it needs no trainer of its own: it feeds forests to
`Trainer.forward_backward` and `optim_step`, and adds only the order of the demonstrations and the learning rate.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.models.base import Decoder
from lightningrl.models.load import export_folder
from lightningrl.trainer.base import Trainer
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Transition

WARMUP = 50
"""Steps over which the learning rate rises to its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One completion to imitate."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    """Its end token included."""


def imitator(model: Decoder, *, tokenizer: Any, threads: int) -> LocalTrainer:
    """A trainer with the loss -A · log π, which is supervised learning for A = 1."""
    config, loss = TrainerConfig.model_validate({"threads": threads}), LossConfig.model_validate({"name": "pg"})
    return LocalTrainer(model, config=config, loss=loss, export=partial(export_folder, tokenizer=tokenizer))


def whole(examples: Sequence[Example], *, prompt: bool) -> Example:
    """A whole conversation as one example: all tokens after its first prompt, or with `prompt` all but the first token.
    Examples that do not extend the first prompt are left out.
    """
    first = examples[0].prompt_ids
    last = next(example for example in reversed(examples) if example.prompt_ids[: len(first)] == first)
    ids, begin = [*last.prompt_ids, *last.completion_ids], 1 if prompt else len(first)
    return Example(prompt_ids=ids[:begin], completion_ids=ids[begin:])


class Imitation:
    """Learns from `size` demonstrations per step, in which all tokens have equal weight. It can return to a saved step.

    The learning rate rises to `peak`, then falls linearly to zero. It reaches zero after `steps` or `seconds`,
    whichever comes first.
    """

    def __init__(
        self,
        trainer: Trainer,
        demonstrations: Sequence[Sequence[Example]],
        *,
        peak: float,
        steps: int,
        size: int,
        seed: int,
        seconds: float = math.inf,
    ) -> None:
        """`trainer`: made by `imitator`."""
        self.steps = steps
        self.step = 0
        """Number of steps taken."""
        self._trainer = trainer
        self._lessons = [_lessons(examples, f"demonstration-{index}") for index, examples in enumerate(demonstrations)]
        self._peak = peak
        self._size = min(size, len(demonstrations))
        self._rng = random.Random(seed)
        self._orders: list[list[int]] = []
        self._seconds = seconds
        self._began = time.perf_counter()

    @property
    def left(self) -> float:
        """Share of the steps, or of the time, that is left: the smaller one."""
        return min(1 - self.step / self.steps, 1 - (time.perf_counter() - self._began) / self._seconds)

    def advance(self, steps: int) -> float:
        """Take up to `steps` steps. Returns their mean loss in nats per token; NaN if no step was left."""
        losses: list[float] = []
        while len(losses) < steps and (left := self.left) > 0:
            losses.append(self._trainer.forward_backward(build_forest(self._batch())).metrics["loss/value"])
            self._trainer.optim_step(learning_rate=self._peak * min((self.step + 1) / WARMUP, left))
            self.step += 1
        return float(np.mean(losses)) if losses else math.nan

    def save(self, folder: Path) -> int:
        """Save weights and optimizer in `folder`. Returns the step for `back_to`."""
        self._trainer.save(folder)
        return self.step

    def back_to(self, step: int, folder: Path) -> None:
        self._trainer.load(folder)
        self.step = step

    def _batch(self) -> list[Lesson]:
        """The lessons of the next step. Every demonstration is used once before any is used again."""
        in_a_round = len(self._lessons) // self._size
        number, place = divmod(self.step, in_a_round)
        while len(self._orders) <= number:
            self._orders.append(self._rng.sample(range(len(self._lessons)), len(self._lessons)))
        chosen = self._orders[number][place * self._size : (place + 1) * self._size]
        lessons = [lesson for index in chosen for lesson in self._lessons[index]]
        total = sum(len(lesson.weights) for lesson in lessons)
        return [replace(lesson, weights=lesson.weights / total) for lesson in lessons]


def mean_loss(trainer: Trainer, demonstrations: Sequence[Sequence[Example]]) -> float:
    """Mean negative log-likelihood of the demonstrations, in nats per token."""
    lessons = [lesson for index, examples in enumerate(demonstrations) for lesson in _lessons(examples, str(index))]
    return float(-np.mean(trainer.evaluate(build_forest(lessons)).logprobs))


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
        made.append(
            Lesson(
                rollout_id=name,
                group_id=name,
                transition=transition,
                advantages=np.ones(count, np.float32),
                weights=np.ones(count),
            )
        )
    return made
