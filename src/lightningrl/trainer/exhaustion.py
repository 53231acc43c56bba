"""When memory runs out in a pass, its forest is split and done again.

This changes nothing that is learnt: a pass that fails leaves no gradient (`masters`), and losses of parts add up.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import torch

from lightningrl.config import LossConfig
from lightningrl.data.forest import Forest
from lightningrl.data.splitting import Part, split
from lightningrl.errors import UserError
from lightningrl.trainer.base import Evaluation
from lightningrl.trainer.metrics import merged
from lightningrl.types import Doubles

log = logging.getLogger(__name__)

EXHAUSTED = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""What errors say when memory runs out on a CPU, in cuBLAS and in cuDNN. torch has no type of its own for them."""

LEARNING = 'set `trainer.checkpointing` to "on", train an adapter (`model.lora_rank`), or lower `engine.max_length`'
LOOKING = "train an adapter (`model.lora_rank`), or lower `engine.max_length`"
"""Hints for a pass that does not fit, with and without a backward pass. Only the former keeps activations."""

Pass: TypeAlias = Callable[[Forest], Evaluation]
Unit: TypeAlias = Literal["call", "rollout"]


def unit_of(loss: LossConfig) -> Unit:
    """What a loss needs whole: all tokens of a rollout, or only those of a call."""
    return "rollout" if loss.ratio == "rollout" or loss.importance.startswith("rollout") else "call"


def in_parts(
    compute: Pass, forest: Forest, *, unit: Unit, lower: Callable[[int], bool], hint: str = LEARNING
) -> Evaluation:
    """The pass over a forest, or over its parts if memory runs out. `lower` is told the tokens of each pass that
    failed, and says whether the same pass may fit now. `hint`: what to do if even one unit does not fit.

    The metric `tokens/out_of_memory` counts the unique tokens of the passes that failed.
    """
    lost, tokens = 0, len(forest.token_ids)
    while (found := _tried(compute, forest)) is None:
        lost += tokens
        log.warning("memory ran out in a pass over %d tokens of %d calls", tokens, len(forest.call_ids))
        if lower(tokens):
            continue
        parts = split(forest, unit=unit)
        if parts is None:
            raise UserError(
                f"memory ran out in a pass over one {unit} of `{tokens}` tokens",
                hint=hint,
            )
        done = [in_parts(compute, part.forest, unit=unit, lower=lower, hint=hint) for part in parts]
        found = _joined(forest, parts, done)
        break
    counted = found.metrics.get("tokens/out_of_memory", 0.0) + lost
    return replace(found, metrics=found.metrics | {"tokens/out_of_memory": counted})


def _tried(compute: Pass, forest: Forest) -> Evaluation | None:
    """The result of a pass; None if memory ran out, and then the pass holds no memory any more."""
    try:
        return compute(forest)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in EXHAUSTED):
            raise
    gc.collect()  # the error's frames held the tensors of the pass; they are gone with it
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _joined(forest: Forest, parts: tuple[Part, Part], found: list[Evaluation]) -> Evaluation:
    """The evaluation of a forest from those of its parts."""

    def spread(size: int, places: list[np.ndarray], values: list[Doubles]) -> Doubles:
        whole = np.empty(size)
        for place, value in zip(places, values, strict=True):
            whole[place] = value
        return whole

    terms = [part.terms for part in parts]
    entropies = [each.entropies for each in found if each.entropies is not None]
    values = [each.values for each in found if each.values is not None]
    return Evaluation(
        metrics=merged([each.metrics for each in found]),
        logprobs=spread(len(forest.targets), terms, [each.logprobs for each in found]),
        entropies=spread(len(forest.targets), terms, entropies) if entropies else None,
        values=spread(len(forest.call_ids), [part.calls for part in parts], values) if values else None,
    )
