"""What do the trainer and the embedded engine of a recipe hold in memory, part by part?

The arithmetic of one model is in `models/footprint.py`. Here it is added up over the policies of a recipe, which share
the weights under their adapters and learn one after the other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightningrl.config import Config, LearnerConfig
from lightningrl.engine.cache import ROWS_PER_SLOT
from lightningrl.engines import model_paths
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.workload import Workload
from lightningrl.models.footprint import (
    Held,
    cache_bytes,
    gathered_bytes,
    head_bytes,
    held,
    token_bytes,
    tokens_in,
)
from lightningrl.models.sizes import Sizes
from lightningrl.trainer.budget import CPU_SHARE, CUDA_SHARE, GATHERED_KEYS, LEAST, MOST
from lightningrl.trainer.logprobs import CHUNK

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
RESERVED = {"cpu": GIB // 2, "cuda": GIB}
"""Assumed memory of the process itself. A process on the CPU with all modules was measured at 0.37 GiB; CUDA's context,
its libraries and fragments of freed memory are not measured.
"""
GRADIENTS, MOMENTS, CACHE = "gradients", "AdamW's moments", "KV cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory."""

    name: str
    bytes: int
    note: str = ""
    """What it follows from, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forests:
    """How the trainer computes."""

    checkpointing: bool
    tokens: int
    """Most unique tokens in one forest."""


def itemsize(learner: LearnerConfig) -> int:
    return ITEMSIZE[learner.model.dtype]


def rank_of(learner: LearnerConfig, sizes: Sizes) -> int:
    """Rank of the adapter that learns; 0: all weights learn."""
    return learner.model.lora_rank or sizes.rank


def holding(learner: LearnerConfig, sizes: Sizes) -> Held:
    """What one policy holds, with the model under its adapter."""
    rank = rank_of(learner, sizes)
    return held(
        parameters=sizes.parameters,
        learning=rank * sizes.adapted or sizes.parameters,
        itemsize=itemsize(learner),
        reference=learner.loss.kl_coef > 0,
    )


def held_parts(config: Config, sizes: Mapping[str, Sizes]) -> list[Part]:
    """What the trainer holds from its first step on. `sizes`: model path → sizes."""
    learners = config.learners().values()
    own = [(learner, sizes[learner.model.path]) for learner in learners]
    each = [holding(learner, size) for learner, size in own]
    bases = {
        (learner.model.path, learner.model.dtype): h.weights
        for (learner, size), h in zip(own, each, strict=True)
        if rank_of(learner, size)
    }
    full = [h.weights for (learner, size), h in zip(own, each, strict=True) if not rank_of(learner, size)]
    several = f", {len(each)} policies" if len(each) > 1 else ""
    adapters = all(rank_of(learner, size) for learner, size in own)
    parts = [
        Part(name="weights", bytes=sum(bases.values()) + sum(full), note=own[0][0].model.dtype),
        Part(
            name="adapters" if adapters else "master weights",
            bytes=sum(h.masters for h in each),
            note=f"float32{several}",
        ),
        Part(name=GRADIENTS, bytes=max(h.gradients for h in each), note="float32"),
        Part(name=MOMENTS, bytes=sum(h.moments for h in each), note=f"float32{several}"),
        Part(name="reference for KL", bytes=sum(h.reference for h in each)),
    ]
    return [part for part in parts if part.bytes]


def computing_parts(
    config: Config, sizes: Mapping[str, Sizes], forests: Forests, *, card: Card, work: Workload
) -> list[Part]:
    """What a forward and backward pass over one forest takes, for the policy that takes most."""
    made = [_computing(learner, sizes[learner.model.path], forests, card=card, work=work) for learner in _all(config)]
    return max(made, key=total)


def _computing(learner: LearnerConfig, sizes: Sizes, forests: Forests, *, card: Card, work: Workload) -> list[Part]:
    b, shape, N = itemsize(learner), sizes.shape, forests.tokens
    per_token = per_token_bytes(learner, sizes, checkpointing=forests.checkpointing, card=card)
    saved = "each layer's input" if forests.checkpointing else "all layers"
    parts = [
        Part(name="activations", bytes=N * per_token, note=f"{N:,} tokens × {per_token / 1e3:,.0f} kB: {saved}"),
        Part(name="LM head", bytes=_head(learner, sizes, tokens=N, device=card.kind), note="logits in chunks"),
    ]
    if card.flash:
        merged = min(work.unique_tokens / max(work.unique_in(8) / 8, 1.0), GATHERED_KEYS)  # keys for each token
        keys = gathered_bytes(shape, itemsize=b, keys=int(N * merged))
        parts.append(Part(name="attention", bytes=keys, note="keys and values along paths, one layer"))
    return parts


def per_token_bytes(learner: LearnerConfig, sizes: Sizes, *, checkpointing: bool, card: Card) -> int:
    """Bytes of activations for each token of a forest. Without CUDA's kernel of attention, the CPU's are an upper
    bound.
    """
    return token_bytes(
        sizes.shape,
        itemsize=itemsize(learner),
        rank=rank_of(learner, sizes),
        checkpointing=checkpointing,
        fused=card.flash,
    )


def engine_parts(config: Config, sizes: Mapping[str, Sizes]) -> list[Part]:
    """What the embedded engine takes beside the trainer, whose weights it shares."""
    if config.engine.name != "embedded":
        return []
    learners = config.learners()
    rows, length = ROWS_PER_SLOT * config.engine.slots, config.engine.max_length
    cache = weights = 0
    for policy, path in model_paths(config).items():
        b = ITEMSIZE[learners.get(policy, config).model.dtype]
        cache += cache_bytes(sizes[path].shape, tokens=rows * length, itemsize=b)
        weights += 0 if policy in learners else sizes[path].parameters * b
    parts = [
        Part(name=CACHE, bytes=cache, note=f"{config.engine.slots} slots × {ROWS_PER_SLOT} × {length:,} tokens"),
        Part(name="frozen models", bytes=weights),
    ]
    return [part for part in parts if part.bytes]


def request_tokens(work: Workload) -> int:
    """Tokens of a call at its end, on average."""
    return max(int(work.prompt_tokens + work.completion_tokens), 1)


def rollouts_together(config: Config) -> int:
    """Most rollouts of a step that run at the same time."""
    return min(config.agent.concurrency, config.loop.tasks_per_step * config.loop.group_size)


def chosen_forests(
    config: Config,
    sizes: Mapping[str, Sizes],
    card: Card,
    *,
    held: Iterable[Part],
    others: int,
    wanted: int,
    most: int = MOST,
) -> Forests:
    """The largest forest that the trainer makes from a minibatch of `wanted` tokens, and whether it keeps all its
    activations: as `trainer/budget.py` chooses. No forest is smaller than a call, here of `engine.max_length` tokens.
    `held`: what the trainer holds. `others`: bytes that others take. `most`: most tokens, if the trainer chooses.
    """
    trainer = next(iter(config.learners().values())).trainer
    coming = sum(part.bytes for part in held if part.name in (GRADIENTS, MOMENTS))
    there = sum(part.bytes for part in held) - coming
    if card.is_gpu:
        free = CUDA_SHARE * (card.memory_bytes - others - there) - coming
    else:
        free = CPU_SHARE * (card.memory_bytes - there - coming)
    kept, fitting = (_most_tokens(config, sizes, free=free, checkpointing=c, card=card) for c in (False, True))
    fitting = fitting if card.is_gpu else max(fitting, LEAST)
    if trainer.checkpointing != "auto":
        kept, fitting = (0, fitting) if trainer.checkpointing == "on" else (wanted, kept)
    limit = min(fitting, most) if trainer.max_tokens == "auto" else trainer.max_tokens
    tokens = min(wanted, max(limit, config.engine.max_length))
    return Forests(checkpointing=tokens > kept, tokens=tokens)


def _most_tokens(config: Config, sizes: Mapping[str, Sizes], *, free: float, checkpointing: bool, card: Card) -> int:
    """Unique tokens of a forest that fit in the free bytes, for the policy that needs most."""
    found: list[int] = []
    for learner in _all(config):
        size = sizes[learner.model.path]
        per_token = per_token_bytes(learner, size, checkpointing=checkpointing, card=card)
        if card.flash:
            per_token += gathered_bytes(size.shape, itemsize=itemsize(learner), keys=GATHERED_KEYS)
        once = _head(learner, size, tokens=MOST, device=card.kind)
        found.append(tokens_in(free - once, per_token=per_token))
    return min(found)


def total(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


def _head(learner: LearnerConfig, sizes: Sizes, *, tokens: int, device: str) -> int:
    rows = min(max(CHUNK[device] // sizes.shape.vocab, 1), tokens)
    return head_bytes(sizes.shape, itemsize=itemsize(learner), rank=rank_of(learner, sizes), rows=rows)


def _all(config: Config) -> list[LearnerConfig]:
    return list(config.learners().values())
