"""How fast are a matrix product, a layer's attention over a forest, and a whole training pass?

FLOPs are those of the computation without anything computed twice: 2 for each multiplication with a weight or between
two tokens that attend to one another, three times for forward and backward (arXiv 2001.08361, appendix B).
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from card.bench import Bench
from card.groups import GROUP, WAYS, beside, conversations, group, merged, passes
from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, read_ids
from lightningrl.models import varlen_attention
from lightningrl.models.base import Attend, Decoder
from lightningrl.models.varlen_attention import by_forest_attention, forest_attention, has_flash
from lightningrl.models.varlen_plan import plan_sequences
from lightningrl.trainer.local import LocalTrainer

REFERENCE = 2048
"""Longest context at which `ForestAttention` is measured: above, its index arrays take gigabytes."""
LONG, FEW = 8192, 3
"""Of contexts that are longer, so many rollouts are measured: a forest of more would exceed `budget.MOST` tokens."""


def matmul(bench: Bench) -> dict[str, float]:
    """TFLOP/s of a product of two square matrices."""
    size = 256 if bench.quick else 8192
    found: dict[str, float] = {}
    for dtype in (bench.dtype, torch.float32):
        a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
        found[str(dtype).removeprefix("torch.")] = (
            2 * size**3 / bench.seconds(lambda a=a, b=b: a @ b, repeats=10) / 1e12
        )
    return found


def attention(bench: Bench) -> list[dict[str, Any]]:
    """Forward and backward passes of one layer's attention over a group of rollouts."""
    model, peak = bench.model(), matmul(bench)[str(bench.dtype).removeprefix("torch.")] * 1e12
    return [_attention(bench, model, context, peak) for context in bench.contexts]


def _attention(bench: Bench, model: Decoder, context: int, peak: float) -> dict[str, Any]:
    rollouts = group(context, vocabulary=bench.vocabulary)
    forest, rows = merged(rollouts), beside(conversations(rollouts))
    given, given_rows = _inputs(bench, model, forest), _inputs(bench, model, rows)
    attend = _attend(forest, model)
    found = {"forest": bench.seconds(lambda: _passed(attend, given))}
    for_rows = _attend(rows, model)
    found["conversations"] = bench.seconds(lambda: _passed(for_rows, given_rows))
    errors: list[float] = []
    if has_flash(bench.device):
        repeatable, varlen_attention.repeatable = varlen_attention.repeatable, lambda _mode: nullcontext()
        found["forest, sums in any order"] = bench.seconds(lambda: _passed(attend, given))
        varlen_attention.repeatable = repeatable
    if context <= REFERENCE:
        reference = by_forest_attention(forest.starts, forest.parents, forest.positions, model=model)
        found["ForestAttention"] = bench.seconds(lambda: _passed(reference, given))
        exact = _exact(forest, model)
        errors = [
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(_passed(attend, given), _passed(exact, [x.float() for x in given]), strict=True)
        ]
    flops = 12.0 * model.heads * model.head_size * _pairs(forest)
    return {
        "context": context,
        "rollouts": len(rollouts),
        "tokens": len(forest.token_ids),
        "keys_gathered": len(plan_sequences(forest.starts, forest.parents, forest.positions).keys),
        "flash": has_flash(bench.device),
        "seconds": found,
        "share_of_peak": flops / found["forest"] / peak,
        "errors_of_output_dq_dk_dv": errors,
    }


def _attend(forest: Forest, model: Decoder) -> Attend:
    return forest_attention(forest.starts, forest.parents, forest.positions, model=model)


def _exact(forest: Forest, model: Decoder) -> Attend:
    """The reference in float32."""
    return by_forest_attention(forest.starts, forest.parents, forest.positions, model=model, dtype=torch.float32)


def _inputs(bench: Bench, model: Decoder, forest: Forest) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    counts = (model.heads, model.kv_heads, model.kv_heads, model.heads)
    random = torch.Generator(bench.device).manual_seed(0)
    sizes = [(len(forest.token_ids), count, model.head_size) for count in counts]
    return [torch.randn(size, generator=random, device=bench.device).to(bench.dtype) for size in sizes]


def _passed(attend: Attend, given: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = attend(0, q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def _pairs(forest: Forest) -> int:
    """Pairs of tokens that attend to one another."""
    return int((forest.positions.astype("int64") + 1).sum())


def training(bench: Bench) -> list[dict[str, Any]]:
    """Forward and backward passes of a whole model over a group, in three ways; the optimizer's step is not timed."""
    peak = matmul(bench)[str(bench.dtype).removeprefix("torch.")] * 1e12
    model = bench.model()
    trainer = LocalTrainer(model, config=TrainerConfig(), loss=LossConfig(), export=export_nothing)
    return [_training(bench, trainer, context, peak) for context in bench.contexts]


def _training(bench: Bench, trainer: LocalTrainer, context: int, peak: float) -> dict[str, Any]:
    members = FEW if context > LONG else GROUP
    rollouts = group(context, vocabulary=bench.vocabulary, members=members)
    called = sum(len(read_ids(lesson.transition)) for calls in rollouts for lesson in calls)
    ways: dict[str, Any] = {}
    for name, way in WAYS.items():
        forests = passes(way(rollouts), most_tokens=trainer.max_tokens)
        seconds = bench.seconds(
            lambda forests=forests: [trainer.forward_backward(forest) for forest in forests],
            repeats=2,
            after=lambda: trainer.optim_step(learning_rate=0.0),
        )
        tokens = sum(len(forest.token_ids) for forest in forests)
        ways[name] = {
            "passes": len(forests),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "tokens_of_calls_per_s": called / seconds,
            "share_of_peak": sum(_flops(trainer.model, forest) for forest in forests) / seconds / peak,
        }
    return {"context": context, "rollouts": members, "tokens_of_calls": called, "ways": ways}


def _flops(model: Decoder, forest: Forest) -> float:
    """Of a training pass with full weights."""
    words = model.vocab_size * model.hidden_size
    body = sum(p.numel() for p in model.hf.parameters()) - words
    rows = len(set(forest.sources.tolist()))
    pairs = model.layers * model.heads * model.head_size * _pairs(forest)
    return 6.0 * body * len(forest.token_ids) + 6.0 * words * rows + 12.0 * pairs


def export_nothing(_model: Decoder, _path: Path) -> None:
    """Nothing is published here."""
