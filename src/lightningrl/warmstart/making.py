"""Demonstrations in, a model folder out: tokenizer and model, the ids to imitate, the way until the agent succeeds."""

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightningrl import plugins
from lightningrl.config import Config
from lightningrl.models.dense import DenseModel
from lightningrl.models.load import export_folder, load_model, load_tokenizer, local_folder
from lightningrl.models.tiny import build_model
from lightningrl.progress import Watcher
from lightningrl.trainer.imitation import Example, Imitation, imitator, mean_loss, whole
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Task
from lightningrl.warmstart.demonstrations import Demonstrations
from lightningrl.warmstart.examples import examples_of
from lightningrl.warmstart.steering import AGAIN, LOW, Arrival, Look, Way, shortcoming, steered, straight
from lightningrl.warmstart.tryout import trying_out
from lightningrl.warmstart.vocabulary import beginning, tokenizer_for

PEAK = 3e-3
"""The highest learning rate for a tiny model, which has learnt nothing."""
HELD_BACK = 32
"""Demonstrations that are not learnt from, where one in ten is so many: the loss on them tells learning by heart from
learning.
"""

MARK = "warmstart.json"
"""The file that tells a folder that was made here from any other."""
REPORT_EVERY = 50
"""Steps of reading between two losses."""


def is_replaceable(folder: Path) -> bool:
    """Is there nothing in it that was not made here?"""
    return folder.is_dir() and ((folder / MARK).is_file() or not any(folder.iterdir()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What the command line may say about the way, and a recipe does not."""

    seconds: float = math.inf
    """Training ends after so much time."""
    order: int | None = None
    """Seed of the order of the demonstrations; None: the recipe's seed."""
    threads: int = 1
    """Of one matrix product. With 1, weights are the same bit for bit on any number of cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A model, and what it can do."""

    parameters: int
    tokens: int
    """Size of the vocabulary."""
    arrival: Arrival
    reason: str
    """The likeliest reason why success is too low; "" if it is not."""
    hint: str
    """What to change then."""


class Narrator(Watcher, Protocol):
    """Hears of what goes on."""

    def started(self, *, parameters: int, tokens: int) -> None:
        """There is a model now."""
        ...

    def read(self, step: int, loss: float) -> None:
        """A stretch of `warmstart.reading` is over."""
        ...

    def looked(self, look: Look) -> None:
        """A stretch of the way is over."""
        ...


async def make(
    config: Config,
    shown: Demonstrations,
    tasks: Sequence[Task],
    *,
    folder: Path,
    out: Path,
    pace: Pace,
    narrator: Narrator,
) -> Made:
    """Make the model and write it to `out`. Records of the trials go into `folder`."""
    settings = config.warmstart
    model, tokenizer = _begun(config, shown)
    parameters = sum(p.numel() for p in model.hf.parameters())
    narrator.started(parameters=parameters, tokens=len(tokenizer))
    with tempfile.TemporaryDirectory(prefix="lightningrl-warmstart-") as scratch:
        begun, shelf = Path(scratch, "model"), Path(scratch, "kept")
        export_folder(model, begun, tokenizer=tokenizer)
        async with trying_out(config, folder, tasks, model=begun, watcher=narrator) as tryout:
            trainer = imitator(tryout.model, tokenizer=tokenizer, threads=pace.threads)
            examples, unseen = _held_back(
                examples_of(shown.answers, tryout.template, max_length=config.engine.max_length), steer=settings.steer
            )
            if settings.reading and not settings.base:
                await asyncio.to_thread(_read, config, examples, trainer, pace=pace, told=narrator.read)
            way = _way(config, examples, trainer, pace=pace)
            if settings.steer:
                arrival = await steered(way, tryout, shelf=shelf, told=narrator.looked)
            else:
                arrival = await straight(way, tryout, told=narrator.looked)
    trainer.publish(out)
    (out / MARK).write_text(
        json.dumps({"recipe": config.name, "demonstrations": len(shown.rows)}) + "\n", encoding="utf-8"
    )
    reason, hint = "", ""
    if arrival.trial.mean < LOW:
        heads = frozenset(beginning(answer) for answers in shown.answers for answer in answers)
        loss = mean_loss(trainer, unseen) if unseen else math.nan
        reason, hint = shortcoming(arrival, heads=heads, unseen=loss, count=len(examples))
    return Made(parameters=parameters, tokens=len(tokenizer), arrival=arrival, reason=reason, hint=hint)


def _begun(config: Config, shown: Demonstrations) -> tuple[DenseModel, Any]:
    """The model before its first step, and its tokenizer."""
    settings = config.warmstart
    if settings.base:
        folder = local_folder(settings.base, root=config.root)
        return load_model(folder), load_tokenizer(folder)
    if settings.tokenizer:
        tokenizer = plugins.load(settings.tokenizer, kind="tokenizer", root=config.root)(shown.rows)
    else:
        tokenizer = tokenizer_for(shown.answers)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes: Mapping[str, int] = {**settings.shape}
    return build_model(len(tokenizer), seed=config.seed, **sizes, **ends), tokenizer


def _held_back(examples: list[list[Example]], *, steer: bool) -> tuple[list[list[Example]], list[list[Example]]]:
    """(those to learn from, those that the model never sees)"""
    count = HELD_BACK if steer and len(examples) >= 10 * HELD_BACK else 0
    return examples[: len(examples) - count], examples[len(examples) - count :]


def _way(config: Config, examples: Sequence[Sequence[Example]], trainer: LocalTrainer, *, pace: Pace) -> Way:
    settings = config.warmstart
    seed = config.seed if pace.order is None else pace.order
    first = settings.learning_rate or (AGAIN if settings.base else PEAK)

    def way(peak: float | None) -> Imitation:
        highest = first if peak is None else min(first, peak)
        return Imitation(
            trainer, examples, peak=highest, steps=settings.steps, size=settings.batch, seed=seed, seconds=pace.seconds
        )

    return way


def _read(
    config: Config,
    examples: Sequence[Sequence[Example]],
    trainer: LocalTrainer,
    *,
    pace: Pace,
    told: Callable[[int, float], None],
) -> None:
    """Learn all that stands in a conversation, what tools answer included."""
    settings = config.warmstart
    texts = [[whole(own, prompt=settings.reading_prompts)] for own in examples]
    seed = config.seed if pace.order is None else pace.order
    course = Imitation(
        trainer, texts, peak=settings.learning_rate or PEAK, steps=settings.reading, size=settings.batch, seed=seed
    )
    while course.left > 0:
        loss = course.advance(REPORT_EVERY)
        told(course.step, loss)
