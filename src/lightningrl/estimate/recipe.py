"""The estimate of a recipe: memory by part, seconds of a step, hours and money."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from lightningrl.config import Config
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.fit import Changes, changes_that_fit, overrides
from lightningrl.estimate.memory import (
    MOMENTS,
    RESERVED,
    VLLM_SHARE,
    Forests,
    Part,
    chosen_forests,
    computing_parts,
    engine_parts,
    held_parts,
    requests_together,
    total,
    vllm_parts,
)
from lightningrl.estimate.time import DECODE, DISK, PREFILL, TRAIN, Seconds, generation_s, saving_s, training_s
from lightningrl.estimate.workload import FOLLOW_UP, Workload
from lightningrl.models.sizes import Sizes

LOCAL = {"127.0.0.1", "localhost", "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a recipe takes on a device."""

    name: str
    model: str
    parameters: int
    learning: int
    """Numbers that learn, of all policies."""
    card: Card
    trainer: tuple[Part, ...]
    """Memory of the trainer's process, with the embedded engine's."""
    server: tuple[Part, ...]
    """Memory that vLLM needs on its card; empty: it is embedded, or of another kind."""
    server_is_here: bool
    """Whether that card is the trainer's."""
    forests: Forests
    work: Workload
    rollouts: int
    """Rollouts of a step."""
    step_tokens: int
    """Tokens of a step's calls, each call with its whole history."""
    unique_tokens: int
    """Tokens of a step after merging shared prefixes."""
    sampled_tokens: int
    seconds: Seconds
    steps: int
    exams_s: float | None
    """Seconds of all evaluations."""
    per_hour: float | None
    """Price of an hour; None: not given."""
    assumptions: tuple[str, ...]
    advice: tuple[str, ...]
    """What to change so that it fits, and what to tell vLLM."""

    @property
    def needed_bytes(self) -> int:
        """Memory that the trainer's device needs."""
        return total(self.trainer) + (total(self.server) if self.server_is_here else 0)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.card.memory_bytes

    @property
    def server_share(self) -> float:
        """The most of the card that vLLM may take beside the trainer: its `--gpu-memory-utilization`."""
        return math.floor(100 * (1 - total(self.trainer) / self.card.memory_bytes)) / 100

    @property
    def hours(self) -> float | None:
        """None: some part is unknown."""
        step = self.seconds.total
        return None if step is None or self.exams_s is None else (self.steps * step + self.exams_s) / 3600

    @property
    def price(self) -> float | None:
        hours = self.hours
        return None if hours is None or self.per_hour is None else hours * self.per_hour


def estimate(
    config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, per_hour: float | None = None
) -> Estimate:
    """The estimate for a device. `sizes`: model path → sizes, for every model of the recipe."""
    found = _estimate(config, sizes, card, work=work, per_hour=per_hour)

    def fits(other: Config) -> bool:
        return _estimate(other, sizes, card, work=work, per_hour=None).fits

    changes = None if found.fits else changes_that_fit(config, fits)
    return replace(found, advice=tuple(_advice(config, found, changes)))


def _estimate(
    config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, per_hour: float | None
) -> Estimate:
    """The estimate without advice."""
    loop, first = config.loop, next(iter(config.learners().values()))
    rollouts = loop.tasks_per_step * loop.group_size
    vllm = config.engine.name == "vllm"
    here = vllm and card.is_gpu and all(urlsplit(url).hostname in LOCAL for url in config.engine.urls)
    least = total(vllm_parts(config, sizes, work=work, room=0)) if here else 0
    forests, trainer = _trainer(config, sizes, card, work=work, beside=least)
    room = card.memory_bytes - total(trainer) if here else int(VLLM_SHARE * card.memory_bytes)
    server = vllm_parts(config, sizes, work=work, room=room) if vllm else []
    together = requests_together(config, sizes, work=work, server=server)
    seconds = _seconds(config, sizes, card, work=work, forests=forests, together=together)
    return Estimate(
        name=config.name,
        model=first.model.path,
        parameters=sizes[first.model.path].parameters,
        learning=sum(part.bytes for part in trainer if part.name == MOMENTS) // 8,
        card=card,
        trainer=tuple(trainer),
        server=tuple(server),
        server_is_here=here,
        forests=forests,
        work=work,
        rollouts=rollouts,
        step_tokens=int(rollouts * work.calls * (work.prompt_tokens + work.completion_tokens)),
        unique_tokens=int(loop.tasks_per_step * work.unique_in(loop.group_size)),
        sampled_tokens=int(rollouts * work.sampled_tokens),
        seconds=seconds,
        steps=loop.steps,
        exams_s=_exams_s(config, seconds, rollouts=rollouts),
        per_hour=per_hour,
        assumptions=tuple(_assumptions(config, card, work, seconds, shared=here)),
        advice=(),
    )


def _advice(config: Config, found: Estimate, changes: Changes | None) -> Iterator[str]:
    card, dtype = found.card, next(iter(config.learners().values())).model.dtype
    free = card.memory_bytes - total(found.trainer)
    if changes:
        yield f"this would fit: {overrides(changes)}"
    if found.server_is_here and not found.fits and free >= 0:
        yield "the trainer alone fits: give vLLM a card of its own, and name its address in `engine.urls`"
    elif not found.fits and not changes:
        yield "choose a smaller model, or a larger device"
    if found.server_is_here and found.fits:
        yield f"vLLM shares this card: start it with `--gpu-memory-utilization {found.server_share:.2f}` at most"
    if card.peaks.get("float16", 0.0) > card.peaks[dtype] and dtype == "bfloat16":
        yield f"`{card.name}` is slow in bfloat16: set `model.dtype=float16`"


def _trainer(
    config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, beside: int
) -> tuple[Forests, list[Part]]:
    """How the trainer computes, and the parts of its memory. `beside`: bytes of the card that vLLM takes."""
    held = held_parts(config, sizes)
    others = [*engine_parts(config, sizes), Part(name="torch", bytes=RESERVED[card.kind], note="assumed")]
    batch = config.loop.tasks_per_step * work.unique_in(config.loop.group_size)
    wanted = math.ceil(batch / next(iter(config.learners().values())).trainer.minibatches)
    forests = chosen_forests(config, sizes, card, held=held, others=total(others) + beside, wanted=wanted)
    return forests, [*held, *computing_parts(config, sizes, forests, device=card.kind, work=work), *others]


def _seconds(
    config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, forests: Forests, together: float
) -> Seconds:
    loop, learners = config.loop, config.learners()
    rollouts = loop.tasks_per_step * loop.group_size
    first = sizes[next(iter(learners.values())).model.path]
    known = config.engine.name == "embedded" or (card.is_gpu and config.engine.name == "vllm")
    training = [
        training_s(
            learner,
            sizes[learner.model.path],
            card,
            work=work,
            forests=forests,
            tasks=loop.tasks_per_step,
            group=loop.group_size,
        )
        for learner in learners.values()
    ]
    return Seconds(
        generation=generation_s(config, first, card, work=work, rollouts=rollouts, together=together)
        if known
        else None,
        agent=None if work.agent_s is None else work.agent_s * rollouts,
        training=sum(training) / len(training),  # policies share the calls of a batch
        saving=saving_s(config, sizes),
    )


def _exams_s(config: Config, seconds: Seconds, *, rollouts: int) -> float | None:
    """Seconds of the evaluations: in two modes before and after training, and in one mode in between."""
    if seconds.generation is None:
        return None
    loop, heldout = config.loop, config.tasks.heldout
    between = len(range(loop.eval_every, loop.steps, loop.eval_every)) if loop.eval_every else 0
    tasks = 2 * 2 * heldout + between * min(loop.eval_tasks, heldout)
    return tasks * (seconds.generation + (seconds.agent or 0.0)) / rollouts


def _assumptions(config: Config, card: Card, work: Workload, seconds: Seconds, *, shared: bool) -> Iterator[str]:
    """What the estimate takes for granted."""
    if not work.is_measured:
        told = f"{work.calls:g} calls of a rollout, {work.completion_tokens:,.0f} tokens sampled by each"
        yield f"{told}; a later call reads its history and {FOLLOW_UP} new tokens"
    reached = f"training reaches {TRAIN:.0%} of the peak, reading prompts {PREFILL:.0%}"
    yield f"{reached}, decoding {DECODE:.0%} of the bandwidth"
    yield f"{RESERVED[card.kind] / GIB:g} GiB for torch itself; {DISK / 1e9:g} GB/s to save and load weights"
    if seconds.agent is None:
        yield "agents take no time of their own"
    if seconds.generation is None:
        yield f"the time of engine `{config.engine.name}` depends on its server, which is not known here"
    elif config.engine.name == "vllm" and not shared:
        count = len(config.engine.urls)
        yield f"vLLM has {'a card' if count == 1 else f'{count} cards'} of the same kind"
