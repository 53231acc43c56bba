"""How many tokens fit in one pass, and which passes keep their activations? The memory that is free decides."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightningrl.config import TrainerConfig
from lightningrl.models.base import Decoder
from lightningrl.models.footprint import gathered_bytes, head_bytes, shape_of, token_bytes, tokens_in
from lightningrl.models.memory import machine_memory
from lightningrl.models.varlen_attention import KEYS_AT_ONCE
from lightningrl.trainer.logprobs import rows_at_once
from lightningrl.trainer.masters import Masters

MOST = 65536
"""Most unique tokens of a forest whose size is chosen here."""
LEAST = 4096
"""Fewest of them on a CPU with checkpointing: its share leaves memory that they may take."""
CPU_SHARE = 0.5
"""Share for activations of the memory that a machine has besides weights, gradients and moments; agents, engine and
system have the rest. It is the machine's total that counts, not what is free: on the same machine, the same forests are
made.
"""
CUDA_SHARE = 0.9
"""Share of the GPU's free memory; the rest is for buffers of kernels and for fragmentation."""
GATHERED_KEYS = KEYS_AT_ONCE
"""Most keys that attention on CUDA gathers at once, for each token of a forest (see `footprint.gathered_bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one forward and backward pass may take."""

    max_tokens: int
    """Most unique tokens of a forest."""
    kept: int
    """Forests with more unique tokens than this compute each layer again in the backward pass."""


def make_budget(model: Decoder, config: TrainerConfig, *, free_bytes: float) -> Budget:
    """The budget by the settings, or for `auto` by the bytes that are free for activations."""

    def fitting(*, checkpointing: bool) -> int:
        return max(tokens_that_fit(model, free_bytes=free_bytes, checkpointing=checkpointing), 1)

    match config.checkpointing:
        case "auto":
            kept = fitting(checkpointing=False)
        case "on":
            kept = 0
        case "off":
            kept = sys.maxsize
    if config.max_tokens != "auto":
        return Budget(max_tokens=config.max_tokens, kept=kept)
    most = min(fitting(checkpointing=config.checkpointing != "off"), MOST)
    floored = model.device.type == "cpu" and config.checkpointing != "off"
    return Budget(max_tokens=max(most, LEAST) if floored else most, kept=kept)


def budget_counters(budget: Budget) -> Mapping[str, float]:
    """For a checkpoint: what is free, and where memory has run out, differ in a resumed run."""
    return {"max_tokens": budget.max_tokens, "kept_tokens": budget.kept}


def resumed_budget(budget: Budget, config: TrainerConfig, *, counters: Mapping[str, float]) -> Budget:
    """The budget of a checkpoint's counters, within the settings. Old checkpoints have none: it is `budget` then."""
    if "max_tokens" not in counters:
        return budget
    most = MOST if config.max_tokens == "auto" else config.max_tokens
    kept = int(counters["kept_tokens"]) if config.checkpointing == "auto" else budget.kept
    return Budget(max_tokens=min(int(counters["max_tokens"]), most), kept=kept)


def tokens_that_fit(model: Decoder, *, free_bytes: float, checkpointing: bool) -> int:
    """The most unique tokens of a forest whose pass fits in these bytes."""
    shape, itemsize, on_gpu = shape_of(model.hf.config), model.dtype.itemsize, model.device.type == "cuda"
    rank = model.adapter.r if model.adapter is not None else 0
    rows = rows_at_once(shape.vocab, device=model.device)
    per_token = token_bytes(shape, itemsize=itemsize, rank=rank, checkpointing=checkpointing, fused=on_gpu)
    if on_gpu:
        per_token += gathered_bytes(shape, itemsize=itemsize, keys=GATHERED_KEYS)
    once = head_bytes(shape, itemsize=itemsize, rank=rank, rows=rows)
    return tokens_in(free_bytes - once, per_token=per_token)


def free_bytes(model: Decoder, masters: Masters, *, frozen: Iterable[Tensor]) -> float:
    """Bytes for activations, before the first step: without gradients and moments, which are yet to come. `frozen`:
    tensors besides the model's and the masters.
    """
    learning, narrow = _bytes(masters.tensors.values()), _bytes(masters.narrow())
    coming = 3 * learning + narrow  # gradients, two moments, and gradients on their way to float32
    if model.device.type == "cuda":
        cached = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        return CUDA_SHARE * (torch.cuda.mem_get_info(model.device)[0] + cached) - coming
    held = _bytes({id(p): p for p in (*model.hf.parameters(), *masters.tensors.values(), *frozen)}.values())
    return CPU_SHARE * (machine_memory() - held - coming)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
