"""How much memory does each part of training take, and how much does the estimate say?

Parts are measured by what torch has allocated, before and after each comes into being; a pass, with its gradients, by
the peak. On a CPU, torch does not count.
"""

import gc
from typing import Any

from card.bench import Bench, need
from card.groups import group, merged
from card.speed import export_nothing
from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest
from lightningrl.models.base import Decoder
from lightningrl.models.footprint import Shape, gathered_bytes, head_bytes, held, shape_of, token_bytes
from lightningrl.models.varlen_attention import KEYS_AT_ONCE, has_flash
from lightningrl.models.varlen_plan import plan_sequences
from lightningrl.trainer.local import LocalTrainer
from lightningrl.trainer.logprobs import rows_at_once

CONTEXT = 1024
"""Tokens of the longest call."""
RANK = 16


def memory(bench: Bench) -> list[dict[str, Any]]:
    """Full weights and LoRA, with all activations kept and with checkpointing."""
    need("peft")
    return [
        _measured(bench, rank=rank, checkpointing=checkpointing)
        for rank in (0, RANK)
        for checkpointing in (False, True)
    ]


def _measured(bench: Bench, *, rank: int, checkpointing: bool) -> dict[str, Any]:
    from lightningrl.models.lora import with_adapter

    forest = merged(group(96 if bench.quick else CONTEXT, vocabulary=bench.vocabulary))
    gc.collect()  # what was measured before
    empty = bench.allocated()
    base = bench.model()
    loaded = bench.allocated()
    model = with_adapter(base, rank=rank) if rank else base
    config = TrainerConfig.model_validate({"checkpointing": "on" if checkpointing else "off"})
    trainer = LocalTrainer(model, config=config, loss=LossConfig(), export=export_nothing)
    made = bench.allocated()
    trainer.forward_backward(forest)
    trainer.optim_step(learning_rate=1e-6)
    stepped = bench.allocated()
    found = {
        "weights": loaded - empty,
        "masters": made - loaded,
        "moments": stepped - made,
        "pass": bench.peak(lambda: trainer.forward_backward(forest)),
    }
    expected = _expected(bench, base, model, forest, rank=rank, checkpointing=checkpointing)
    return {
        "rank": rank,
        "checkpointing": checkpointing,
        "tokens": len(forest.token_ids),
        "measured_bytes": found if bench.device.type == "cuda" else None,
        "estimated_bytes": expected,
        "estimate_over_measured": {name: expected[name] / size for name, size in found.items() if size},
    }


def _expected(
    bench: Bench, base: Decoder, model: Decoder, forest: Forest, *, rank: int, checkpointing: bool
) -> dict[str, int]:
    """The estimate of each part, as `lightningrl train --estimate` computes it."""
    shape, b, fused = shape_of(base.hf.config), bench.dtype.itemsize, bench.device.type == "cuda"
    learning = sum(p.numel() for p in model.trainable().values())
    parameters = sum(p.numel() for p in model.hf.parameters()) - (learning if rank else 0)
    holds = held(parameters=parameters, learning=learning, itemsize=b, reference=False)
    per_token = token_bytes(shape, itemsize=b, rank=rank, checkpointing=checkpointing, fused=fused)
    return {
        "weights": holds.weights,
        "masters": holds.masters,
        "moments": holds.moments,
        "pass": holds.gradients + len(forest.token_ids) * per_token + _once(bench, shape, forest, rank=rank),
    }


def _once(bench: Bench, shape: Shape, forest: Forest, *, rank: int) -> int:
    """The LM head, and the keys that attention gathers."""
    b, needed = bench.dtype.itemsize, len(set(forest.sources.tolist()))
    gathered = len(plan_sequences(forest.starts, forest.parents, forest.positions).keys)
    keys = min(gathered, KEYS_AT_ONCE * len(forest.token_ids)) if has_flash(bench.device) else 0
    rows = min(rows_at_once(shape.vocab, device=bench.device), needed)
    return head_bytes(shape, itemsize=b, rank=rank, rows=rows) + gathered_bytes(shape, itemsize=b, keys=keys)
