"""The estimate of a recipe: memory by part, seconds of a step, hours and money."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lightningrl.config import Config
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.fit import Changes, changed, changes_that_fit, overrides
from lightningrl.estimate.memory import VLLM_ASLEEP, Memory, given_here, memory_of, requests_together
from lightningrl.estimate.parts import MOMENTS, RESERVED, total
from lightningrl.estimate.time import (
    DECODE,
    DISK,
    PCIE,
    PREFILL,
    SWITCH_S,
    TRAIN,
    Seconds,
    generation_s,
    saving_s,
    sleeping_s,
    training_s,
)
from lightningrl.estimate.workload import FOLLOW_UP, Workload
from lightningrl.models.sizes import Sizes
from lightningrl.trainer.budget import MOST

ELSEWHERE = "'engine.urls=[\"http://other:8000\"]'"
"""Setting for a vLLM on another card, as the command line takes it."""
SIZES = (8192, 16384, 32768, MOST)
"""Forests that are tried on a card with a vLLM, in tokens. Smaller ones compute shared prefixes several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a recipe takes on a device."""

    name: str
    model: str
    parameters: int
    learning: int
    """Numbers that learn, of all policies."""
    policies: int
    """Policies that learn."""
    card: Card
    cannot_run: str
    """Why it cannot run, whatever the memory; empty: it can."""
    memory: Memory
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
        return self.memory.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether it can run, in this memory."""
        return not self.cannot_run and self.needed_bytes <= self.card.memory_bytes

    @property
    def hours(self) -> float | None:
        """None: it does not fit, or some part is unknown."""
        step = self.seconds.total
        if not self.fits or step is None or self.exams_s is None:
            return None
        return (self.steps * step + self.exams_s) / 3600

    @property
    def price(self) -> float | None:
        hours = self.hours
        return None if hours is None or self.per_hour is None else hours * self.per_hour


def estimate(
    config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, per_hour: float | None = None
) -> Estimate:
    """The estimate for a device. `sizes`: model path → sizes, for every model of the recipe."""
    memory, seconds = _chosen(config, sizes, card, work=work)

    def fits(other: Config) -> bool:
        return memory_of(other, sizes, card, work=work).needed_bytes <= card.memory_bytes

    enough = memory.needed_bytes <= card.memory_bytes
    changes = None if enough else changes_that_fit(config, card, fits)
    loop, first = config.loop, next(iter(config.learners().values()))
    rollouts = loop.tasks_per_step * loop.group_size
    found = Estimate(
        name=config.name,
        model=first.model.path,
        parameters=sizes[first.model.path].parameters,
        learning=sum(part.bytes for part in memory.trainer if part.name == MOMENTS) // 8,
        policies=len(config.learners()),
        card=card,
        cannot_run=_cannot_run(config, card),
        memory=memory,
        work=work,
        rollouts=rollouts,
        step_tokens=int(rollouts * work.calls * (work.prompt_tokens + work.completion_tokens)),
        unique_tokens=int(loop.tasks_per_step * work.unique_in(loop.group_size)),
        sampled_tokens=int(rollouts * work.sampled_tokens),
        seconds=seconds,
        steps=loop.steps,
        exams_s=_exams_s(config, seconds, rollouts=rollouts),
        per_hour=per_hour,
        assumptions=tuple(_assumptions(config, card, work, seconds, memory)),
        advice=(),
    )
    second = None if enough or changes else _on_two(config, sizes, card, work=work)
    return replace(found, advice=tuple(_advice(config, found, changes, second=second)))


def _on_two(config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload) -> Changes | None:
    """The settings with which the recipe fits if the vLLM that it owns gets a second such card; None if none do."""
    if not config.engine.owns_vllm or not card.is_gpu or card.count > 1:
        return None
    apart, two = {"engine.gpus": [1], "engine.sleep": "auto"}, replace(card, count=2)

    def fits(other: Config) -> bool:
        return memory_of(other, sizes, two, work=work).needed_bytes <= two.memory_bytes

    other = changed(config, apart)
    more = {} if fits(other) else changes_that_fit(other, two, fits)
    return None if more is None else {"engine.gpus": [1], **more}


def _chosen(config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload) -> tuple[Memory, Seconds]:
    """Memory and time of a step. If the trainer chooses the size of its forests on a card with a given vLLM, the size
    that takes the least time: large forests leave vLLM no room for its cache.
    """

    def tried(most: int) -> tuple[Memory, Seconds]:
        memory = memory_of(config, sizes, card, work=work, most=most)
        return memory, _seconds(config, sizes, card, work=work, memory=memory)

    def cost(found: tuple[Memory, Seconds]) -> tuple[bool, float, int]:
        memory, seconds = found
        return memory.needed_bytes > card.memory_bytes, seconds.total or 0.0, -memory.forests.tokens

    largest = tried(MOST)
    return min(map(tried, SIZES), key=cost) if given_here(config, card) else largest


def _cannot_run(config: Config, card: Card) -> str:
    dtype = next(iter(config.learners().values())).model.dtype
    if config.engine.name == "vllm" and dtype == "bfloat16" and not card.bfloat16:
        return f"vLLM has no bfloat16 on `{card.name}`"
    return ""


def _advice(config: Config, found: Estimate, changes: Changes | None, *, second: Changes | None) -> Iterator[str]:
    card, memory, learner = found.card, found.memory, next(iter(config.learners().values()))
    dtype, fits, here = learner.model.dtype, found.needed_bytes <= card.memory_bytes, given_here(config, card)
    if found.cannot_run:
        yield f"{found.cannot_run}: set `model.dtype=float16`"
    elif dtype == "bfloat16" and card.peaks.get("float16", 0.0) > card.peaks[dtype]:
        yield f"`{card.name}` is slow in bfloat16: set `model.dtype=float16`"
    if changes:
        yield f"this would fit: {overrides(changes)}"
    if not fits and here and total(memory.trainer) <= card.memory_bytes:
        yield f"the trainer alone fits: give vLLM a card of its own, and estimate with `{ELSEWHERE}`"
    elif second:
        yield f"with a second such card for vLLM, this would fit: {overrides(second)}"
    elif not fits and not changes:
        yield "choose a smaller model, or a larger device"
    if fits and here:
        start = f"start {'it' if here == 1 else 'each'} with `--gpu-memory-utilization {memory.server_share:.2f}`"
        train = f", and train with `trainer.max_tokens={memory.forests.tokens}`"
        yield f"vLLM shares this card: {start} at most{train if learner.trainer.max_tokens == 'auto' else ''}"


def _seconds(config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, memory: Memory) -> Seconds:
    loop, learners = config.loop, config.learners()
    rollouts = loop.tasks_per_step * loop.group_size
    first = sizes[next(iter(learners.values())).model.path]
    together = requests_together(config, sizes, work=work, memory=memory)
    known = config.engine.name == "embedded" or (card.is_gpu and config.engine.name == "vllm")
    training = [
        training_s(
            learner,
            sizes[learner.model.path],
            card,
            work=work,
            forests=memory.forests,
            tasks=loop.tasks_per_step,
            group=loop.group_size,
        )
        for learner in learners.values()
    ]
    return Seconds(
        generation=generation_s(config, first, card, work=work, rollouts=rollouts, together=together, memory=memory)
        if known
        else None,
        agent=None if work.agent_s is None else work.agent_s * rollouts,
        training=sum(training) / len(training),  # policies share the calls of a batch
        saving=saving_s(config, sizes),
        sleeping=sleeping_s(memory),
    )


def _exams_s(config: Config, seconds: Seconds, *, rollouts: int) -> float | None:
    """Seconds of the evaluations."""
    if seconds.generation is None:
        return None
    return exam_tasks(config) * (seconds.generation + (seconds.agent or 0.0)) / rollouts


def exam_tasks(config: Config) -> int:
    """Rollouts of the evaluations: in two modes before and after training, and in one mode in between."""
    loop, heldout = config.loop, config.tasks.heldout
    between = len(range(loop.eval_every, loop.steps, loop.eval_every)) if loop.eval_every else 0
    return 2 * 2 * heldout + between * min(loop.eval_tasks, heldout)


def _assumptions(config: Config, card: Card, work: Workload, seconds: Seconds, memory: Memory) -> Iterator[str]:
    """What the estimate takes for granted."""
    if not work.is_measured:
        told = f"{work.calls:g} calls of a rollout, {work.completion_tokens:,.0f} tokens sampled by each"
        yield f"{told}; a later call reads its history and {FOLLOW_UP} new tokens"
    reached = f"training reaches {TRAIN:.0%} of the peak, reading prompts {PREFILL:.0%}"
    yield f"{reached}, decoding {DECODE:.0%} of the bandwidth"
    yield f"{RESERVED[card.kind] / GIB:g} GiB for torch itself; {DISK / 1e9:g} GB/s to save and load weights"
    if seconds.agent is None:
        yield "the agents' own time is not known, and not counted"
    if card.is_gpu and not card.flash:
        yield "attention takes no more time than with CUDA's kernel, which this card lacks"
    if seconds.generation is None:
        yield f"the time of engine `{config.engine.name}` depends on its server, which is not known here"
    if memory.sleeps:
        yield f"a sleeping vLLM keeps {VLLM_ASLEEP / GIB:g} GiB of its card, for CUDA's context and graphs"
        yield f"it takes {SWITCH_S:g} s to sleep and wake up, and moves its weights at {PCIE / 1e9:g} GB/s"
    elif given_here(config, card):
        told = "servers on this machine share the trainer's card"
        yield f"{told}; for a second card, estimate with {ELSEWHERE}"
    elif config.engine.name == "vllm" and card.is_gpu and not memory.servers_here:
        yield f"vLLM has {'a card' if memory.servers == 1 else f'{memory.servers} cards'} of the same kind"
