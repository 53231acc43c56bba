"""How long does a step take? Pure functions of sizes, tokens and a device's speed.

    training     FLOPs / (peak · TRAIN)                 FLOPs of a token: arXiv 2001.08361, section 2.1
    generation   prompts: FLOPs / (peak · PREFILL); sampled tokens: one pass over weights and cache for all requests
                 that are decoded together (arXiv 2211.05102, section 2)
    saving       bytes of a checkpoint / DISK
    sleeping     twice the bytes of vLLM's weights / PCIE, and SWITCH_S

The constants are assumptions: they are not measured on the device at hand.

Legend: P numbers that a token is multiplied with · L layers · Q width of all query heads · T tokens attended to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightningrl.config import Config, LearnerConfig
from lightningrl.estimate.cards import Card
from lightningrl.estimate.memory import Memory
from lightningrl.estimate.parts import Forests, holding, itemsize, rank_of
from lightningrl.estimate.workload import Workload
from lightningrl.learner import needs_critic
from lightningrl.models.footprint import cache_bytes
from lightningrl.models.sizes import Sizes

TRAIN = 0.3
"""Share of the peak that training reaches."""
PREFILL = 0.4
"""Share of the peak that reading prompts reaches."""
DECODE = 0.5
"""Share of the bandwidth that decoding reaches."""
LAYER_S = {"vllm": 20e-6, "embedded": 200e-6}
"""Seconds that a layer takes at least when it decodes: the time to start its kernels, with and without CUDA graphs."""
DISK = 1e9
"""Bytes that are written or read in a second."""
PCIE = 10e9
"""Bytes that go between a GPU and the machine's memory in a second."""
SWITCH_S = 2.0
"""Seconds that vLLM takes to fall asleep and to wake up, besides moving its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of a step, by part."""

    generation: float | None
    """None: the server's card is unknown."""
    agent: float | None
    """The agents' own time. None: unknown."""
    training: float
    saving: float
    sleeping: float = 0.0
    """vLLM falls asleep and wakes up again."""

    @property
    def total(self) -> float | None:
        """None: some part of generation is unknown."""
        if self.generation is None:
            return None
        return self.generation + (self.agent or 0.0) + self.training + self.saving + self.sleeping


def train_flops(
    sizes: Sizes, *, tokens: float, sampled: float, path: float, rank: int, checkpointing: bool, evaluations: int
) -> float:
    """FLOPs of the training passes over a batch: `tokens` unique ones with `path` keys each on average, and LM head for
    `sampled` ones. `evaluations`: further forward passes, for a reference or a critic.

    Forward 2 P + 4 L Q T a token. The backward pass takes as much again for activations, and for weights if they learn;
    attention's takes 2.5 times its forward pass (arXiv 2307.08691, section 3.1). Checkpointing adds a forward pass, and
    the LM head is computed again in any case.
    """
    shape = sizes.shape
    body, head = 2 * sizes.computed, 2 * shape.hidden * shape.vocab
    attention = 4 * shape.layers * shape.q_width * path
    again = 1 if checkpointing else 0
    backward = 2 if rank == 0 else 1
    passes = tokens * (body * (1 + backward + again) + attention * (3.5 + again)) + sampled * head * (2 + backward)
    return passes + evaluations * (tokens * (body + attention) + sampled * head)


def decode_s(
    sizes: Sizes, card: Card, *, dtype: str, bytes_each: int, together: float, context: float, layer_s: float
) -> float:
    """Seconds to sample one token for each of `together` requests with `context` tokens each: the slower of reading
    weights and caches and of computing, and no less than the layers' kernels take to start.
    """
    head = sizes.shape.hidden * sizes.shape.vocab
    cached = cache_bytes(sizes.shape, tokens=int(together * context), itemsize=bytes_each)
    reading = ((sizes.computed + head) * bytes_each + cached) / (card.bandwidth * DECODE)
    computing = 2 * (sizes.computed + head) * together / (card.peaks[dtype] * PREFILL)
    return max(reading, computing, sizes.shape.layers * layer_s)


def generation_s(
    config: Config, sizes: Sizes, card: Card, *, work: Workload, rollouts: float, together: float, memory: Memory
) -> float:
    """Seconds to generate all calls of `rollouts` rollouts, `together` at the same time on each server, if requests
    never have to wait for agents. Servers that share the trainer's card take longest.
    """
    learner = next(iter(config.learners().values()))
    b, dtype = itemsize(learner), learner.model.dtype
    servers = memory.servers / max(memory.servers_here, 1)  # among as many the work is divided
    layer_s = LAYER_S["embedded" if config.engine.name == "embedded" else "vllm"] if card.is_gpu else 0.0
    context = work.prompt_tokens + work.completion_tokens / 2
    one = decode_s(sizes, card, dtype=dtype, bytes_each=b, together=together, context=context, layer_s=layer_s)
    read = rollouts * max(work.unique_tokens - work.sampled_tokens, 0.0) / servers  # the rest is in the prefix cache
    prefill = read * 2 * sizes.computed / (card.peaks[dtype] * PREFILL)
    return prefill + rollouts * work.sampled_tokens / servers / together * one


def training_s(
    learner: LearnerConfig, sizes: Sizes, card: Card, *, work: Workload, forests: Forests, tasks: int, group: int
) -> float:
    """Seconds to train one policy on a batch. All calls are counted as its own, and none as left out."""
    evaluations = (learner.loss.kl_coef > 0) + learner.loss.proximal + needs_critic(learner)
    flops = train_flops(
        sizes,
        tokens=tasks * work.unique_in(group),
        sampled=tasks * group * work.sampled_tokens,
        path=work.path_tokens,
        rank=rank_of(learner, sizes),
        checkpointing=forests.checkpointing,
        evaluations=evaluations,
    )
    found = holding(learner, sizes)
    optimizer = (2 * found.masters + found.gradients + 2 * found.moments) * learner.trainer.minibatches / card.bandwidth
    return flops / (card.peaks[learner.model.dtype] * TRAIN) + optimizer


def saving_s(config: Config, sizes: Mapping[str, Sizes]) -> float:
    """Seconds to save all policies after a step, and to load them into an engine that does not share them."""
    written = loaded = 0
    for learner in config.learners().values():
        size, b = sizes[learner.model.path], itemsize(learner)
        found, rank = holding(learner, size), rank_of(learner, size)
        published = (rank * size.adapted or size.parameters) * b
        written += published + max(found.masters, published) + found.moments
        loaded += 0 if config.engine.name == "embedded" else published
    return (written + loaded) / DISK


def sleeping_s(memory: Memory) -> float:
    """Seconds of a step in which vLLM falls asleep and wakes up: its weights go to the machine's memory and back."""
    if not memory.sleeps:
        return 0.0
    return 2 * memory.server[0].bytes / PCIE + SWITCH_S
