"""Where does a vLLM run that the run owns, does it sleep while the trainer trains, and how large is its cache?

    trainer and vLLM share a GPU   vLLM serves beside what the trainer keeps, and sleeps while it trains
    vLLM has GPUs of its own       one server on each
    no GPU                         one server, beside the trainer in the machine's memory

Pure functions of the settings and of the memory that there is. vLLM gets the bytes of its cache, and not a share of the
GPU, which different versions of it fill differently.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightningrl.config import Config
from lightningrl.engine.vllm_flags import slot_rank
from lightningrl.errors import UserError
from lightningrl.estimate.cards import GIB
from lightningrl.estimate.parts import (
    CACHE,
    GRADIENTS,
    RESERVED,
    Part,
    held_parts,
    itemsize,
    rank_of,
    rollouts_together,
    total,
)
from lightningrl.models.footprint import cache_bytes
from lightningrl.models.sizes import Sizes

VLLM_RESERVED = {"cpu": GIB, "cuda": 2 * GIB}
"""Assumed memory of vLLM besides weights and cache: CUDA graphs, activations, its context; on CPUs its modules."""
VLLM_SHARE = 0.9
"""Share of a GPU that is planned for; the rest is for fragmentation, and for what is assumed too small."""
BESIDE = {"cpu": 0.25, "cuda": 0.5}
"""Share for vLLM's cache of the memory that it and a trainer which does not wait for it leave, by the trainer's device:
activations may take half (`CPU_SHARE` in trainer/budget.py), and agents run on the CPU.
"""
BLOCK = 256
"""Tokens of the largest block in which vLLM keeps keys and values. A request fills whole blocks, and one is never used
(v1/core/block_pool.py of vLLM 0.32).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the servers are that a run owns."""

    gpus: tuple[int, ...]
    """GPU of each server, as torch numbers them; empty: there is one server, on the CPU."""
    shared: bool
    """Whether the trainer is on one of these GPUs, or like the server on the CPU."""
    sleeps: bool
    """Whether the servers give their GPU memory to the trainer for each update."""

    @property
    def servers(self) -> int:
        return max(len(self.gpus), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a run starts its own vLLM servers with."""

    gpus: tuple[int, ...]
    """GPU of each server, as torch numbers them; empty: there is one server, on the CPU."""
    visible: tuple[str | None, ...]
    """`CUDA_VISIBLE_DEVICES` of each server; None: as in this process."""
    sleeps: tuple[bool, ...]
    """Whether each server gives its GPU memory to the trainer for each update."""
    cache_bytes: int
    """Memory of each server for keys and values: `--kv-cache-memory-bytes`."""
    utilization: float
    """`--gpu-memory-utilization`: the share of the GPU for weights and cache alone. vLLM starts only if so much is
    free. With the bytes of its cache given, vLLM uses the share for nothing else.
    """


def place(config: Config, *, count: int, training: bool = True) -> Placement:
    """Where servers go on a machine with `count` GPUs. Without `training`, no GPU is kept for a trainer.
    Raises `UserError` for settings that it cannot follow.
    """
    wanted, sleep = config.engine.gpus, config.engine.sleep if training else "off"
    missing = [number for number in wanted if not 0 <= number < count]
    if missing:
        hint = f"this machine has GPUs 0 to {count - 1}" if count else "this machine has none that torch can use"
        raise UserError(f"`engine.gpus` names GPU `{missing[0]}`", hint=f"{hint}; leave `engine.gpus` out to choose")
    if len(set(wanted)) < len(wanted):
        raise UserError(f"`engine.gpus` is `{wanted}`", hint="each GPU runs one server; name it once")
    trainers = trainer_gpus(config, count=count) if training else set[int]()
    gpus = wanted or [number for number in range(count) if number not in trainers] or sorted(trainers)
    both = not trainers.isdisjoint(gpus)
    if sleep == "on" and gpus and not both:
        hint = "leave `engine.sleep` at `auto`, or name the trainer's GPU in `engine.gpus`"
        raise UserError("`engine.sleep` is `on`, but trainer and vLLM share no GPU", hint=hint)
    return Placement(gpus=tuple(gpus), shared=both or not gpus, sleeps=sleep == "on" or (sleep == "auto" and both))


def trainer_gpus(config: Config, *, count: int) -> set[int]:
    """GPUs on which policies are trained, of the first `count`."""
    names = {learner.trainer.device for learner in config.learners().values()}
    first = {"cuda:0"} if names & {"auto", "cuda"} else set[str]()
    return {number for number in range(count) if f"cuda:{number}" in names | first}


def gpus_named(config: Config) -> int:
    """Number of GPUs that a machine needs for the settings to name existing ones."""
    names = [learner.trainer.device.partition(":")[2] for learner in config.learners().values()]
    return 1 + max([0, *config.engine.gpus, *(int(number) for number in names if number)])


def visible_to(gpus: Sequence[int], *, ours: str | None) -> tuple[str | None, ...]:
    """`CUDA_VISIBLE_DEVICES` of a process for each GPU. `ours`: of this process, whose GPUs torch numbers in the order
    in which it names them (by number or UUID); None: it is not set.
    """
    if not gpus:
        return (None,)
    names = None if ours is None else [name.strip() for name in ours.split(",")]
    return tuple(str(number) if names is None else names[number] for number in gpus)


def layout(
    config: Config,
    sizes: Mapping[str, Sizes],
    *,
    gpus: Sequence[int],
    machine_bytes: int,
    visible: str | None,
    training: bool = True,
) -> Layout:
    """How to start the servers. `gpus`: bytes of each GPU of this machine. `visible`: as `ours` in `visible_to`.
    `training`: as in `place`. Raises `UserError` for settings that it cannot follow.
    """
    found = place(config, count=len(gpus), training=training)
    memory = min((gpus[number] for number in found.gpus), default=machine_bytes)
    parts = vllm_parts(config, sizes, found, memory_bytes=memory)
    cache = next(part.bytes for part in parts if part.name == CACHE)
    needed = total(parts) - VLLM_RESERVED["cuda" if found.gpus else "cpu"]
    trainers = trainer_gpus(config, count=len(gpus))
    return Layout(
        gpus=found.gpus,
        visible=visible_to(found.gpus, ours=visible),
        sleeps=tuple(found.sleeps and number in trainers for number in found.gpus) or (found.sleeps,),
        cache_bytes=cache,
        utilization=min(max(math.floor(1000 * needed / memory) / 1000, 0.001), VLLM_SHARE),
    )


def vllm_parts(
    config: Config, sizes: Mapping[str, Sizes], found: Placement, *, memory_bytes: int, resting: bool = True
) -> list[Part]:
    """What an owned server takes of a GPU, or of the machine's memory. `resting`: beside what the trainer keeps; else a
    cache no larger than one request needs.
    """
    learner = next(iter(config.learners().values()))
    size, b = sizes[learner.model.path], itemsize(learner)
    kind = "cuda" if found.gpus else "cpu"
    learners = config.learners().values()
    rank = max(rank_of(one, sizes[one.model.path]) for one in learners)
    adapters = len(learners) * slot_rank(rank) * size.adapted * b if rank else 0
    parts = [
        Part(name="weights", bytes=size.parameters * b, note=learner.model.dtype),
        Part(name="adapters", bytes=adapters),
        Part(name="vLLM itself", bytes=VLLM_RESERVED[kind], note="assumed"),
    ]
    room = VLLM_SHARE * memory_bytes - total(parts) - (resting_bytes(config, sizes, kind=kind) if found.shared else 0)
    if found.shared and not found.sleeps:
        room *= BESIDE[kind]
    cache = _cache(config, size, b=b, servers=found.servers, room=int(room) if resting else 0)
    parts.insert(1, Part(name=CACHE, bytes=cache))
    return [part for part in parts if part.bytes]


def resting_bytes(config: Config, sizes: Mapping[str, Sizes], *, kind: str) -> int:
    """What the trainer keeps while vLLM serves. An update has no gradients left."""
    return sum(part.bytes for part in held_parts(config, sizes) if part.name != GRADIENTS) + RESERVED[kind]


def host_bytes(config: Config, sizes: Mapping[str, Sizes], found: Placement) -> int:
    """Memory of the machine that the GPUs' weights take: a sleeping server keeps its own there, and policies that learn
    all of their weights hand them over there.
    """
    learners = config.learners().values()
    weights = [sizes[one.model.path].parameters * itemsize(one) for one in learners]
    handed = sum(bytes for one, bytes in zip(learners, weights, strict=True) if not rank_of(one, sizes[one.model.path]))
    asleep = found.servers * weights[0] if found.sleeps and found.gpus else 0
    return asleep + handed


def _cache(config: Config, sizes: Sizes, *, b: int, servers: int, room: int) -> int:
    """Bytes of keys and values: at least for one request of `engine.max_length` tokens, at most for all rollouts that
    run at the same time, in between what fits into `room`; or as `engine.cache_gib` says.
    """
    length = (math.ceil(config.engine.max_length / BLOCK) + 1) * BLOCK
    request = cache_bytes(sizes.shape, tokens=length, itemsize=b)
    wanted = config.engine.cache_gib
    if wanted == "auto":
        most = request * math.ceil(rollouts_together(config) / servers)
        return max(min(most, room), request)
    if wanted * GIB < request:
        least = math.ceil(100 * request / GIB) / 100
        hint = f"set `engine.cache_gib` to `auto` or at least `{least:g}`, or lower `engine.max_length`"
        message = f"`engine.cache_gib` is `{wanted:g}`, too small for a request of {config.engine.max_length:,} tokens"
        raise UserError(message, hint=hint)
    return int(wanted * GIB)
