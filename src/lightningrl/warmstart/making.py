"""Demonstrations → tokenizer and model → token ids → training, steered by trials of the agent → a model folder."""

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
from lightningrl.models.base import Decoder
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
"""Peak learning rate for a new tiny model."""
HELD_BACK = 32
"""Number of demonstrations held back if there are ten times as many. The loss on them shows memorization."""

MARK = "warmstart.json"
"""File that marks a folder as made by this command."""
REPORT_EVERY = 50
"""Number of steps in `warmstart.reading` between two reports of the loss."""


def is_replaceable(folder: Path) -> bool:
    """Whether the folder is empty, or was made by this command."""
    return folder.is_dir() and ((folder / MARK).is_file() or not any(folder.iterdir()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Options of training that only the command line has."""

    seconds: float = math.inf
    """Time limit of a training pass."""
    order: int | None = None
    """Seed for the order of the demonstrations; None: the recipe's seed."""
    threads: int = 1
    """Threads of a matrix product. With 1, weights are bit-identical on any number of cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A new model and how well it does."""

    parameters: int
    tokens: int
    """Size of the vocabulary."""
    arrival: Arrival
    reason: str
    """Likeliest reason why success is too low; "" if it is not."""
    hint: str
    """What to change then; "" if nothing."""


class Narrator(Watcher, Protocol):
    """Reports progress."""

    def started(self, *, parameters: int, tokens: int) -> None:
        """The model is built."""
        ...

    def read(self, step: int, loss: float) -> None:
        """`REPORT_EVERY` steps of `warmstart.reading` are done."""
        ...

    def looked(self, look: Look) -> None:
        """A stretch of training is done."""
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
    """Make the model and write it to `out`. Records of the trials are written to `folder`."""
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


def _begun(config: Config, shown: Demonstrations) -> tuple[Decoder, Any]:
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
    """(examples to learn from, held-back examples)"""
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
    """Train on whole conversations, including tool results."""
    settings = config.warmstart
    texts = [[whole(own, prompt=settings.reading_prompts)] for own in examples]
    seed = config.seed if pace.order is None else pace.order
    course = Imitation(
        trainer, texts, peak=settings.learning_rate or PEAK, steps=settings.reading, size=settings.batch, seed=seed
    )
    while course.left > 0:
        loss = course.advance(REPORT_EVERY)
        told(course.step, loss)
