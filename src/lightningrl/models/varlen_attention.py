"""Attention over a forest on CUDA, by the flash-attention kernel that torch has built in (arXiv 2307.08691).

Each sequence of the plan has its queries once, and the keys and values of its whole path, gathered (see `varlen_plan`).

    copies     a layer gathers T = Σ (path length of a leaf) keys, as many as rows of whole conversations have tokens:
               2·T·K·E numbers, written and read once. They exist while one layer computes. The backward pass gathers
               them again, so only q, k, v and the output are kept.
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
from lightningrl.models.varlen_plan import gathers_nothing, plan_sequences, readers

AMPERE = (8, 0)
"""The first compute capability that the kernel supports."""
LARGEST_HEAD = 256
"""Largest head size that the kernel supports."""
DTYPES = frozenset({torch.float16, torch.bfloat16})
"""What the kernel computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """A `Plan` on a device."""

    query_ends: Tensor
    """[B + 1] int32"""
    key_ends: Tensor
    """[B + 1] int32"""
    longest_queries: int
    longest_keys: int
    keys: Tensor | None
    """[T] token of each key; None: the keys are the tokens themselves."""
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
        self._sequences: dict[int | None, Sequences] = {}
        self._exact: ForestAttention | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
        """See `Attend`."""
        if not _computes(q, k, v, style):
            return self._by_forest_attention(layer, q, k, v, style)
        window = None if style.window is None or style.window >= self._longest else style.window
        if window not in self._sequences:
            self._sequences[window] = _on_device(*self._forest, window=window, device=q.device)
        scale = q.shape[2] ** -0.5 if style.scale is None else style.scale
        out: Any = _Attention.apply(q, k, v, self._sequences[window], scale, window)
        return out

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
    """The kernel over gathered keys and values. Keeps what has N rows for the backward pass, not what has T."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int | None
    ) -> Tensor:
        K, V = _gathered(k, sequences), _gathered(v, sequences)
        out, logs, _ = torch.ops.torch_attn._varlen_attn(q, K, V, *_arguments(sequences, window), scale, _reach(window))
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.sequences, ctx.scale, ctx.window = sequences, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, logs = ctx.saved_tensors
        sequences, scale, window = ctx.sequences, ctx.scale, ctx.window
        K, V = _gathered(k, sequences), _gathered(v, sequences)
        without_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of its random numbers
        with repeatable("error"):
            dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
                *(grads[0], q, K, V, out, logs),
                *_arguments(sequences, window),
                *(without_dropout, scale, _reach(window)),
            )
        return dq, _summed(dk, sequences, k), _summed(dv, sequences, v), None, None, None


def _arguments(sequences: Sequences, window: int | None) -> tuple[Tensor, Tensor, int, int, bool]:
    """The sequences, and whether they are causal without a window."""
    ends = sequences.query_ends, sequences.key_ends
    return *ends, sequences.longest_queries, sequences.longest_keys, window is None


def _reach(window: int | None) -> list[int]:
    """How many keys before and after a query's own token it reads; -1: all."""
    return [-1 if window is None else window - 1, 0]


def _gathered(x: Tensor, sequences: Sequences) -> Tensor:
    """[N K E] → [T K E]"""
    return x if sequences.keys is None else x.index_select(0, sequences.keys)


def _summed(d: Tensor, sequences: Sequences, x: Tensor) -> Tensor:
    """Gradients of gathered rows [T K E] → of the rows `x` [N K E]. Each token is in one group of readers."""
    if sequences.keys is None:
        return d
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = torch.promote_types(d.dtype, torch.float32)
    for tokens, rows in sequences.readers:
        parts = d.index_select(0, rows.view(-1)).view(*rows.shape, *d.shape[1:])
        total.index_copy_(0, tokens, parts.sum(1, dtype=wide).to(x.dtype))
    return total


def _on_device(
    starts: np.ndarray, parents: np.ndarray, positions: np.ndarray, *, window: int | None, device: torch.device
) -> Sequences:
    plan = plan_sequences(starts, parents, positions, window=window)
    alone = gathers_nothing(plan)

    def moved(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Sequences(
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
    starts: np.ndarray, parents: np.ndarray, positions: np.ndarray, *, model: Decoder
) -> ForestAttention:
    """The `Attend` that every device computes."""
    return ForestAttention(
        starts,
        parents,
        positions,
        heads=model.heads,
        kv_heads=model.kv_heads,
        dtype=model.dtype,
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
