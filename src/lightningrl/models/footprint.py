"""How much memory does a model take in training and in serving? Pure arithmetic on its shape; no torch, no weights.

The trainer's memory is what it holds (`held`), what each token of a forest saves for the backward pass
(`token_bytes`), and what is needed once, however many tokens there are (`head_bytes`). A trainer that chooses its own
budget asks:

    shape = shape_of(model.hf.config)
    per_token = token_bytes(shape, itemsize=2, rank=16, checkpointing=True, fused=True)
    once = head_bytes(shape, itemsize=2, rank=16, rows=883)
    max_tokens = tokens_in(free_bytes - once, per_token=per_token)

where `free_bytes` is what is free after weights, masters, moments and gradients have their place (`held`). The method
is that of arXiv 2205.05198, section 4.1, applied to the operations of this project's own code.
tests/models/test_footprint.py compares it with the tensors that autograd saves. Families that `AnyHF` runs save 0.8 to
1.2 times as much; gpt-oss, with its experts, 1.7 times.

Legend: D hidden size · H query heads · K key/value heads · E head size · R rank of the adapters · b bytes of a number
(`itemsize`).
"""

from dataclasses import dataclass
from typing import Any

FLOAT32 = 4
"""Bytes of a float32. Masters, gradients that are summed, and AdamW's moments are float32, whatever the model's dtype
is.
"""
PROJECTIONS = 7
"""Projections of a layer that get an adapter: q, k, v, o, gate, up and down."""
SOFTMAX_ROWS = 128
"""Rows of logits whose softmax is computed together (see `trainer/logprobs.py`)."""
DENSE = ("llama", "qwen2", "qwen3")
"""Model types that `DenseModel` runs."""
NORMALISES_HEADS = ("gemma3_text", "olmo2", "olmo3", "qwen3", "qwen3_moe")
"""Model types that normalise queries and keys."""
FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
"""Model types with norms before and after attention and MLP; the others have two norms in a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder that decide how much memory and time it takes."""

    layers: int
    hidden: int
    intermediate: int
    """Numbers between the projections of the MLP that one token computes: of all experts that it is routed to."""
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    norms: int = 2
    """Norms over the hidden size in a layer."""
    normalises_heads: bool = False
    """Whether queries and keys are normalised."""
    dense: bool = True
    """Whether `DenseModel` runs it. The norms of other models are not fused on CUDA."""

    @property
    def q_width(self) -> int:
        """H·E"""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """K·E"""
        return self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that a trainer holds from its first step on."""

    weights: int
    """The model in its own dtype."""
    masters: int
    """float32 weights that learn: adapters, or copies of weights in another dtype; 0 if the model is float32."""
    gradients: int
    moments: int
    """AdamW's two moments."""
    reference: int
    """Frozen copy for the KL term."""

    @property
    def total(self) -> int:
        return self.weights + self.masters + self.gradients + self.moments + self.reference


def shape_of(config: Any) -> Shape:
    """The shape in a configuration of Hugging Face. Of a mixture of experts, one token's share. A family that names no
    heads or no width (GPT-2, Mamba) counts as one with a single head or with an MLP four times as wide as the model.
    """
    config = config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", None) or 1
    experts: int | None = getattr(config, "num_experts_per_tok", None)
    width = getattr(config, "moe_intermediate_size", None) if experts else None
    width = width or getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=width * (experts or 1),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        norms=4 if config.model_type in FOUR_NORMS else 2,
        normalises_heads=config.model_type in NORMALISES_HEADS,
        dense=config.model_type in DENSE,
    )


def held(*, parameters: int, learning: int, itemsize: int, reference: bool) -> Held:
    """What a trainer holds. `parameters`: numbers of the model without an adapter. `learning`: numbers that learn: the
    adapter's, or all `parameters`. `reference`: whether a KL term needs a frozen copy of weights that learn.
    """
    full = learning == parameters
    own_masters = full and itemsize == FLOAT32  # float32 weights are their own masters
    passing = learning * itemsize if full and itemsize != FLOAT32 else 0  # gradients on their way to float32
    return Held(
        weights=parameters * itemsize,
        masters=0 if own_masters else learning * FLOAT32,
        gradients=learning * FLOAT32 + passing,
        moments=2 * learning * FLOAT32,
        reference=parameters * itemsize if reference and full else 0,
    )


def layer_bytes(shape: Shape, *, itemsize: int, rank: int, fused: bool) -> int:
    """Bytes that a layer saves for the backward pass, per token.

    Two norms and their outputs, q and k normalised and rotated as one tensor, scaled q, v and the attention's output,
    and the MLP's gate, its activation, up, and their product. `fused`: with CUDA's kernels, an RMSNorm saves its input
    in the model's dtype, where the CPU's saves it in float32, and attention saves q as it is, which k's tensor holds.
    `rank`: of the adapters; 0: all weights learn.
    """
    b, qk, fused_norms = itemsize, shape.q_width + shape.kv_width, fused and shape.dense
    norms = shape.norms * (_norm_bytes(shape.hidden, b=b, full=rank == 0, fused=fused_norms) + b * shape.hidden)
    queries = FLOAT32 * shape.heads if fused else b * shape.q_width  # the kernel's softmax sums, or scaled q
    attention = queries + b * (qk + shape.q_width + shape.kv_width)
    mlp = b * 4 * shape.intermediate
    heads = _heads_norm_bytes(shape, b=b, full=rank == 0, fused=fused_norms)
    return norms + heads + attention + mlp + _adapter_bytes(shape, b=b, rank=rank)


def token_bytes(shape: Shape, *, itemsize: int, rank: int, checkpointing: bool, fused: bool) -> int:
    """Bytes of activations at the peak of a training step, per token of a forest.

    Without `checkpointing`, all layers are saved when the backward pass is at the last norm or in the last MLP. With
    it, each layer has saved its input alone, and one layer at a time is computed again.
    """
    b, D = itemsize, shape.hidden
    layer = layer_bytes(shape, itemsize=b, rank=rank, fused=fused)
    in_norm = _norm_bytes(D, b=b, full=rank == 0, fused=fused and shape.dense) + b * D + 4 * FLOAT32 * D
    in_mlp = b * (2 * shape.intermediate + D)
    if checkpointing:
        return shape.layers * b * D + max(layer + in_mlp, in_norm)
    return shape.layers * layer + max(in_mlp, in_norm)


def head_bytes(shape: Shape, *, itemsize: int, rank: int, rows: int) -> int:
    """Bytes of the LM head and the log-probabilities at their peak, for chunks of `rows` tokens.

    Logits and their gradient in the model's dtype, and a float32 softmax of `SOFTMAX_ROWS` of them. If the head learns
    (`rank` 0), its gradient is summed in float32, beside that of one chunk.
    """
    chunk = shape.vocab * (2 * itemsize * rows + 2 * FLOAT32 * min(rows, SOFTMAX_ROWS))
    return chunk + (shape.vocab * shape.hidden * (FLOAT32 + itemsize) if rank == 0 else 0)


def gathered_bytes(shape: Shape, *, itemsize: int, keys: int) -> int:
    """Bytes of the `keys` that attention on CUDA gathers along paths, while one layer's backward pass computes: keys,
    values, their gradients, and those of every query head if heads share keys (see `varlen_attention`).
    """
    heads = 2 * shape.q_width if shape.heads != shape.kv_heads else 0
    return itemsize * keys * (4 * shape.kv_width + heads)


def tokens_in(free_bytes: float, *, per_token: int) -> int:
    """The most tokens of a forest that fit in the free bytes; 0 if there are none."""
    return max(int(free_bytes // per_token), 0)


def cache_bytes(shape: Shape, *, tokens: int, itemsize: int) -> int:
    """Keys and values of `tokens` tokens in all layers (arXiv 2309.06180, section 1)."""
    return 2 * shape.layers * shape.kv_width * itemsize * tokens


def _norm_bytes(width: int, *, b: int, full: bool, fused: bool) -> int:
    """Saved by an RMSNorm over the hidden size: its input and one float32; if its weight learns without a fused kernel,
    the normalised input too.
    """
    if fused:
        return b * width + FLOAT32
    return FLOAT32 * width * (2 if full else 1) + FLOAT32


def _heads_norm_bytes(shape: Shape, *, b: int, full: bool, fused: bool) -> int:
    """Saved by the norm of queries and keys, whose weight is multiplied apart."""
    if not shape.normalises_heads:
        return 0
    width, count = shape.q_width + shape.kv_width, shape.heads + shape.kv_heads
    return (b if fused else FLOAT32) * width + FLOAT32 * count + (b * width if full else 0)


def _adapter_bytes(shape: Shape, *, b: int, rank: int) -> int:
    """Saved by the adapters: A x of each projection. `DenseModel` computes them in the model's dtype, other models in
    float32, with a copy of each input.
    """
    if shape.dense or not rank:
        return b * PROJECTIONS * rank
    inputs = 2 * shape.hidden + shape.q_width + shape.intermediate if b < FLOAT32 else 0
    return FLOAT32 * (PROJECTIONS * rank + inputs)
