"""How much memory does a recipe take, at its worst moment? Of the trainer's device, of vLLM's, and of the machine."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from lightningrl.config import Config
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.layout import (
    VLLM_RESERVED,
    VLLM_SHARE,
    Placement,
    host_bytes,
    place,
    resting_bytes,
    vllm_parts,
)
from lightningrl.estimate.parts import (
    CACHE,
    RESERVED,
    Forests,
    Part,
    chosen_forests,
    computing_parts,
    engine_parts,
    held_parts,
    itemsize,
    rollouts_together,
    total,
)
from lightningrl.estimate.workload import Workload
from lightningrl.models.footprint import cache_bytes
from lightningrl.models.sizes import Sizes
from lightningrl.trainer.budget import MOST

VLLM_ASLEEP = 2 * GIB
"""Assumed memory that a sleeping vLLM keeps on its GPU: its CUDA context, its libraries and its CUDA graphs."""
LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"}
"""Hosts of servers on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What takes a device's memory at one time."""

    title: str
    parts: tuple[Part, ...]
    counted: bool = True
    """Whether it must fit on a card like the trainer's; else it is on a machine of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a recipe takes on a device."""

    capacity: int
    """Bytes of the device."""
    forests: Forests
    trainer: tuple[Part, ...]
    """The trainer's process, with the embedded engine."""
    server: tuple[Part, ...]
    """One vLLM server; empty: the engine is embedded, or of another kind."""
    servers: int
    """vLLM servers in all."""
    servers_here: int
    """Those on the trainer's device."""
    owned: bool
    """Whether the run starts them, on devices like the trainer's."""
    sleeps: bool
    """Whether they sleep while the trainer trains."""
    resting: int
    """Bytes that the trainer keeps while they serve."""
    host_bytes: int
    """Memory of the machine beside the GPUs."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All that must fit."""
        return tuple(self._phases())

    def _phases(self) -> Iterator[Phase]:
        if not self.server:
            yield Phase(title="trainer and engine", parts=self.trainer)
        elif self.sleeps:
            asleep = Part(name="vLLM, asleep", bytes=VLLM_ASLEEP, note="assumed")
            yield Phase(title="while the trainer trains", parts=(*self.trainer, asleep))
            resting = Part(name="the trainer, at rest", bytes=self.resting)
            yield Phase(title="while vLLM serves", parts=(resting, *self.server))
        elif self.servers_here:
            yield Phase(title="trainer", parts=self.trainer)
            beside = Part(name="the trainer", bytes=total(self.trainer))
            yield Phase(title="vLLM, on the same device", parts=(beside, *self.server * self.servers_here))
        else:
            yield Phase(title="trainer", parts=self.trainer)
            yield Phase(title="vLLM, on a card of its own", parts=self.server, counted=self.owned)

    @property
    def needed_bytes(self) -> int:
        """Bytes that each device needs."""
        return max(total(phase.parts) for phase in self.phases if phase.counted)

    @property
    def server_share(self) -> float:
        """The most of the card that each given vLLM on it may take beside the trainer: `--gpu-memory-utilization`."""
        return math.floor(100 * (1 - total(self.trainer) / self.capacity) / self.servers_here) / 100


def memory_of(config: Config, sizes: Mapping[str, Sizes], card: Card, *, work: Workload, most: int = MOST) -> Memory:
    """Memory by part. `most`: most tokens of a forest whose size the trainer chooses."""
    placed = placed_on(config, card)
    server = list[Part]() if placed is None else vllm_parts(config, sizes, placed, memory_bytes=card.memory_bytes)
    here = given_here(config, card) if placed is None else int(placed.shared)
    held = held_parts(config, sizes)
    others = [*engine_parts(config, sizes), Part(name="torch", bytes=RESERVED[card.kind], note="assumed")]
    batch = config.loop.tasks_per_step * work.unique_in(config.loop.group_size)
    wanted = math.ceil(batch / next(iter(config.learners().values())).trainer.minibatches)
    if placed is None:
        beside = here * total(given_parts(config, sizes, work=work, room=0))
    else:
        beside = taken_beside(placed, server)
    forests = chosen_forests(config, sizes, card, held=held, others=total(others) + beside, wanted=wanted, most=most)
    trainer = [*held, *computing_parts(config, sizes, forests, card=card, work=work), *others]
    if config.engine.name == "vllm" and placed is None:
        room = (card.memory_bytes - total(trainer)) // here if here else int(VLLM_SHARE * card.memory_bytes)
        server = given_parts(config, sizes, work=work, room=room)
    return Memory(
        capacity=card.memory_bytes,
        forests=forests,
        trainer=tuple(trainer),
        server=tuple(_noted(part, config, sizes, work=work) for part in server),
        servers=max(len(config.engine.urls), 1) if placed is None else placed.servers,
        servers_here=here,
        owned=placed is not None and bool(placed.gpus) == card.is_gpu,
        sleeps=placed is not None and placed.sleeps and placed.shared,
        resting=resting_bytes(config, sizes, kind=card.kind),
        host_bytes=0 if placed is None or not card.is_gpu else host_bytes(config, sizes, placed),
    )


def placed_on(config: Config, card: Card) -> Placement | None:
    """Where the servers are that the run owns, if every GPU of the machine is such a card; None: it owns none."""
    return place(config, count=card.count) if config.engine.owns_vllm else None


def given_here(config: Config, card: Card) -> int:
    """Given vLLM servers that share the trainer's card: those on this machine."""
    local = [url for url in config.engine.urls if urlsplit(url).hostname in LOCAL]
    return len(local) if config.engine.name == "vllm" and card.is_gpu else 0


def taken_beside(placed: Placement, server: Sequence[Part]) -> int:
    """Bytes that an owned server takes of the trainer's device while the trainer trains."""
    if not placed.shared:
        return 0
    return VLLM_ASLEEP if placed.sleeps else total(server)


def given_parts(config: Config, sizes: Mapping[str, Sizes], *, work: Workload, room: int) -> list[Part]:
    """What a given vLLM server takes of `room` bytes: at least a cache for one request of `engine.max_length` tokens,
    at most one for all rollouts that run at the same time.
    """
    learner = next(iter(config.learners().values()))
    size, b, reserved = sizes[learner.model.path], itemsize(learner), VLLM_RESERVED["cuda"]
    weights, request = size.parameters * b, request_bytes(config, sizes, work=work)
    least = cache_bytes(size.shape, tokens=config.engine.max_length, itemsize=b)
    cache = max(min(rollouts_together(config) * request, room - weights - reserved), least)
    return [
        Part(name="weights", bytes=weights, note=learner.model.dtype),
        Part(name=CACHE, bytes=cache),
        Part(name="vLLM itself", bytes=reserved, note="assumed"),
    ]


def request_bytes(config: Config, sizes: Mapping[str, Sizes], *, work: Workload) -> int:
    """Keys and values of a call at its end, on average."""
    learner = next(iter(config.learners().values()))
    return cache_bytes(sizes[learner.model.path].shape, tokens=request_tokens(work), itemsize=itemsize(learner))


def request_tokens(work: Workload) -> int:
    """Tokens of a call at its end, on average."""
    return max(int(work.prompt_tokens + work.completion_tokens), 1)


def requests_together(config: Config, sizes: Mapping[str, Sizes], *, work: Workload, memory: Memory) -> float:
    """Requests that one server decodes at the same time, if all rollouts of a step are running."""
    each = rollouts_together(config) / memory.servers
    if not memory.server:
        return max(min(each, config.engine.slots), 1.0)
    cache = next(part.bytes for part in memory.server if part.name == CACHE)
    return max(min(each, cache / request_bytes(config, sizes, work=work)), 1.0)


def _noted(part: Part, config: Config, sizes: Mapping[str, Sizes], *, work: Workload) -> Part:
    """The part; a server's cache with the number of requests that it holds."""
    if part.name != CACHE:
        return part
    together = rollouts_together(config)
    count = min(max(part.bytes // request_bytes(config, sizes, work=work), 1), together)
    note = f"{count:,} of {together:,} requests at once, {request_tokens(work):,} tokens each"
    return Part(name=CACHE, bytes=part.bytes, note=note)
