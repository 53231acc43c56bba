"""Attention over a forest on CUDA, by the flash-attention kernel that torch has built in (arXiv 2307.08691).

Each sequence of the plan has its queries once, and the keys and values of its whole path, gathered (see `varlen_plan`).

    copies     a layer gathers Σ (path length of a leaf) keys, as many as rows of whole conversations have tokens, and
               writes and reads each once: 2·K·E numbers. At most `KEYS_AT_ONCE`·N of them exist at a time, and only
               while one layer computes: the backward pass gathers them again, and q, k, v and the output are kept.
    repeats    gradients of gathered keys are summed in a fixed order, in float32. The kernel's own backward pass runs
               in torch's deterministic mode. So equal inputs give equal bits.
    refuses    float32 and float64, head sizes that are no multiple of 8 or above 256, soft caps and sinks: such a call
               is computed by `ForestAttention`, as are all on CPUs, on GPUs before Ampere and with torch before 2.11.

FlexAttention would copy no keys: the trie is depth first, so its mask is `key <= query < end[key]`. But it needs a
compiler (Triton) at run time, and compiles before the first step; this kernel is in every build of torch for CUDA.
The calls go to the operators below `torch.nn.attention.varlen.varlen_attn`, whose signatures are the same in torch
2.11 to 2.13. The public function would keep the gathered keys for the backward pass.

Legend: N tokens · B sequences · T gathered keys · H query heads · K key/value heads · E head size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from lightningrl.models.base import PLAIN, Attend, Decoder, Style
from lightningrl.models.determinism import repeatable
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.models.varlen_plan import Plan, gathers_nothing, parts_of, plan_sequences, readers

AMPERE = (8, 0)
"""The first compute capability that the kernel supports."""
KEYS_AT_ONCE = 2
"""Most keys that are gathered at once, per token of the forest: it bounds their memory for any forest. No path is
longer than the forest, so a sequence always fits.
"""
LARGEST_HEAD = 256
"""Largest head size that the kernel supports."""
DTYPES = frozenset({torch.float16, torch.bfloat16})
"""What the kernel computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A `Plan` on a device."""

    queries: slice
    """The tokens that are queries."""
    query_ends: Tensor
    """[B + 1] int32"""
    key_ends: Tensor
    """[B + 1] int32"""
    longest_queries: int
    longest_keys: int
    keys: Tensor | None
    """[T] token of each key; None: the keys are the queries' own tokens."""
    readers: tuple[tuple[Tensor, Tensor], ...]
    """Tokens [n] and their rows [n m] among the gathered keys, for each m."""


class VarlenAttention:
    """An `Attend` over a forest's `starts` [S + 1], `parents` [S] and `positions` [N]."""

    def __init__(
        self,
        starts: np.ndarray,
        parents: np.ndarray,
        positions: np.ndarray,
        *,
        model: Decoder,
    ) -> None:
        import torch.nn.attention.varlen  # noqa: F401 - defines the operators; older versions of torch lack it

        self._forest = starts, parents, positions
        self._longest = int(positions.max(initial=0)) + 1
        self._model = model
        self._parts: dict[int | None, list[Sequences]] = {}
        self._exact: ForestAttention | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
        """See `Attend`."""
        if not _computes(q, k, v, style):
            return self._by_forest_attention(layer, q, k, v, style)
        window = None if style.window is None or style.window >= self._longest else style.window
        if window not in self._parts:
            self._parts[window] = self._planned(window, q.device)
        scale = q.shape[2] ** -0.5 if style.scale is None else style.scale
        out: Any = _Attention.apply(q, k, v, self._parts[window], scale, window)
        return out

    def _planned(self, window: int | None, device: torch.device) -> list[Sequences]:
        plan = plan_sequences(*self._forest, window=window)
        return [_on_device(part, device) for part in parts_of(plan, most_keys=KEYS_AT_ONCE * len(self._forest[2]))]

    def _by_forest_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        if self._exact is None:
            self._exact = by_forest_attention(*self._forest, model=self._model)
        return self._exact(layer, q, k, v, style)


def _computes(q: Tensor, k: Tensor, v: Tensor, style: Style) -> bool:
    """Whether the kernel computes this call."""
    plain = style.softcap is None and style.sinks is None
    alike = q.shape[2] == k.shape[2] == v.shape[2] and q.dtype == k.dtype == v.dtype
    return plain and alike and q.shape[2] % 8 == 0 and q.shape[2] <= LARGEST_HEAD and q.dtype in DTYPES


class _Attention(torch.autograd.Function):
    """The kernel over gathered keys and values, part by part. What has N rows is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: list[Sequences], scale: float, window: int | None
    ) -> Tensor:
        outs: list[Tensor] = []
        logs: list[Tensor] = []
        for part in parts:
            gathered = q[part.queries], _gathered(k, part), _gathered(v, part)
            out, log, _ = torch.ops.torch_attn._varlen_attn(*gathered, *_arguments(part, window), scale, _reach(window))
            outs.append(out)
            logs.append(log)
        out = outs[0] if len(parts) == 1 else torch.cat(outs)
        ctx.save_for_backward(q, k, v, out, *logs)
        ctx.parts, ctx.scale, ctx.window = parts, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, *logs = ctx.saved_tensors
        dq, (dk, dv) = torch.empty_like(q), (_Sum(k), _Sum(v))
        without_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of its random numbers
        for part, log in zip(ctx.parts, logs, strict=True):
            own = part.queries
            with repeatable("error"):
                dq[own], dK, dV = torch.ops.torch_attn._varlen_attn_backward(
                    *(grads[0][own], q[own], _gathered(k, part), _gathered(v, part), out[own], log),
                    *_arguments(part, ctx.window),
                    *(without_dropout, ctx.scale, _reach(ctx.window)),
                )
            dk.add(dK, part)
            dv.add(dV, part)
        return dq, dk.total(), dv.total(), None, None, None


class _Sum:
    """The gradient of rows `x` [N K E], from those of their copies. It adds in a fixed order, in float32 or wider."""

    def __init__(self, x: Tensor) -> None:
        self._dtype = x.dtype
        self._total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)

    def add(self, d: Tensor, part: Sequences) -> None:
        """Add the gradients [T K E] of the keys that `part` gathers. Each token is in one group of readers."""
        total = self._total
        if part.keys is None:
            total[part.queries] += d
            return
        for tokens, rows in part.readers:
            copies = d.index_select(0, rows.view(-1)).view(*rows.shape, *d.shape[1:])
            total.index_copy_(0, tokens, total.index_select(0, tokens) + copies.sum(1, dtype=total.dtype))

    def total(self) -> Tensor:
        return self._total.to(self._dtype)


def _arguments(part: Sequences, window: int | None) -> tuple[Tensor, Tensor, int, int, bool]:
    """The sequences, and whether they are causal without a window."""
    return part.query_ends, part.key_ends, part.longest_queries, part.longest_keys, window is None


def _reach(window: int | None) -> list[int]:
    """How many keys before and after a query's own token it reads; -1: all."""
    return [-1 if window is None else window - 1, 0]


def _gathered(x: Tensor, part: Sequences) -> Tensor:
    """[N K E] → [T K E]"""
    return x[part.queries] if part.keys is None else x.index_select(0, part.keys)


def _on_device(plan: Plan, device: torch.device) -> Sequences:
    alone = gathers_nothing(plan)

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Sequences(
        queries=slice(plan.first, plan.first + int(plan.query_ends[-1])),
        query_ends=moved(plan.query_ends),
        key_ends=moved(plan.key_ends),
        longest_queries=plan.longest_queries,
        longest_keys=plan.longest_keys,
        keys=None if alone else moved(plan.keys),
        readers=() if alone else tuple((moved(tokens), moved(rows)) for tokens, rows in readers(plan.keys)),
    )


def forest_attention(starts: np.ndarray, parents: np.ndarray, positions: np.ndarray, *, model: Decoder) -> Attend:
    """The fastest `Attend` over a forest that the model's device has."""
    if has_flash(model.device):
        return VarlenAttention(starts, parents, positions, model=model)
    return by_forest_attention(starts, parents, positions, model=model)


def by_forest_attention(
    starts: np.ndarray,
    parents: np.ndarray,
    positions: np.ndarray,
    *,
    model: Decoder,
    dtype: torch.dtype | None = None,
) -> ForestAttention:
    """The `Attend` that every device computes. `dtype`: of its inputs; None: the model's."""
    return ForestAttention(
        starts,
        parents,
        positions,
        heads=model.heads,
        kv_heads=model.kv_heads,
        dtype=dtype or model.dtype,
        device=model.device,
    )


def has_flash(device: torch.device) -> bool:
    """Whether torch has the kernel for this device. ROCm's has other limits, and is not used."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and TorchVersion(torch.__version__) >= "2.11"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= AMPERE
    )
