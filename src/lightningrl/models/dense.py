"""A dense decoder (Qwen3, Qwen2, Llama) whose caller provides the attention.

The fast path among the `Decoder`s. The weights are those of the Hugging Face module, not copies: engine and trainer
share them, and `save_pretrained` exports them.

Legend: N tokens · D hidden size · H query heads · K key/value heads · E head size · V vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightningrl.models.base import Attend, Decoder, eos_token_ids, trainable

Project: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(projection, x [N in]) → [N out]"""

FAMILIES = ("qwen3", "qwen2", "llama")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose angles depend on the position alone, so that a table can hold them."""


def project(module: Any, x: Tensor) -> Tensor:
    """x [N in] → [N out]. A plain linear layer skips the overhead of a module call, which matters in a tiny model."""
    return F.linear(x, module.weight, module.bias) if type(module) is nn.Linear else module(x)


class DenseModel:
    """A Hugging Face causal LM that is run layer by layer."""

    no_cache = None

    def __init__(
        self, hf: Any, *, project: Project = project, adapter: Any = None, base: Decoder | None = None
    ) -> None:
        """A model that `is_dense`. `project` computes its projections. `adapter` and `base` as in `Decoder`."""
        config = hf.config
        self.hf = hf
        self.adapter = adapter
        self.base = base
        self._project = project
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_length: int = config.max_position_embeddings
        self.normalises_heads: bool = config.model_type == "qwen3"
        self._angles: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return eos_token_ids(self.hf)

    def trainable(self) -> dict[str, Tensor]:
        return trainable(self.hf)

    def frozen_copy(self) -> "DenseModel":
        """See `Decoder.frozen_copy`. The model must not have an adapter."""
        return DenseModel(copy.deepcopy(self.hf).requires_grad_(False))

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend, *, checkpointing: bool = False) -> Tensor:
        """See `Decoder.hidden`."""
        base = self.hf.model
        x = base.embed_tokens(token_ids)
        cos, sin = self._rotary(x, positions)
        for index, layer in enumerate(base.layers):
            if checkpointing:  # no operation of a layer is random
                x = checkpoint(
                    self._layer, index, layer, x, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = self._layer(index, layer, x, cos, sin, attend)
        return _normalise(base.norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [.. D] → logits [.. V]."""
        return self.hf.lm_head(hidden)

    def _layer(self, index: int, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        project, mlp = self._project, layer.mlp
        x = x + self._attention(index, layer.self_attn, _normalise(layer.input_layernorm, x), cos, sin, attend)
        y = _normalise(layer.post_attention_layernorm, x)
        return x + project(mlp.down_proj, mlp.act_fn(project(mlp.gate_proj, y)) * project(mlp.up_proj, y))

    def _attention(self, index: int, attn: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        N, H, K, E, project = x.shape[0], self.heads, self.kv_heads, self.head_size, self._project
        # norm and rotation take q and k as one tensor: fewer small operations
        qk = torch.cat((project(attn.q_proj, x), project(attn.k_proj, x)), dim=-1).view(N, H + K, E)
        v = project(attn.v_proj, x).view(N, K, E)
        if self.normalises_heads:
            norm = attn.q_norm
            weight = torch.cat((norm.weight.expand(H, E), attn.k_norm.weight.expand(K, E)))
            qk = F.rms_norm(qk, (E,), None, norm.variance_epsilon) * weight
        q, k = rotate(qk, cos, sin).split((H, K), dim=1)
        return project(attn.o_proj, attend(index, q, k, v).reshape(N, H * E))

    def _rotary(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N 1 E] of the rotary angles, with the sign of the rotation in sin (see `rotate`)."""
        module = self.hf.model.rotary_emb
        if x.device.type != "cpu":  # a table's size would wait for the device
            return _signed(*(t[0, :, None, :] for t in module(x[None], positions[None])))
        reach = int(positions.max()) + 1
        table = self._angles
        if table is None or table[0].shape[0] < reach or table[0].dtype != x.dtype or table[0].device != x.device:
            size = max(64, 1 << (reach - 1).bit_length())  # doubling: few rebuilds, and no odd tails
            rows = torch.arange(size, device=x.device)
            with torch.inference_mode(mode=False), torch.no_grad():  # so that a trainer can use an engine's table
                table = self._angles = _signed(*(t[0, :, None, :] for t in module(x.new_empty(0), rows[None])))
        cos, sin = table
        return cos[positions], sin[positions]


def is_dense(config: Any) -> bool:
    """Whether `DenseModel` computes what Hugging Face does for a model of this configuration (of Hugging Face)."""
    if config.model_type not in FAMILIES:
        return False
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    rotary = config.rope_parameters
    return (
        all(kind == "full_attention" for kind in layer_types)
        and rotary.get("rope_type", "default") in STATIC_ROPE
        and rotary.get("partial_rotary_factor", 1.0) == 1.0
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N heads E] rotary position embedding of x [N heads E] (arXiv 2104.09864, half-split layout).

    x·cos + (-b, a)·sin with x = (a, b); cos and sin [N 1 E]. `sin` carries the minus: half as many operations on small
    tensors.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin)


def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    a, b = sin.chunk(2, dim=-1)
    return cos, torch.cat((-a, b), dim=-1)


def _normalise(module: Any, x: Tensor) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of x [N D], as one operation."""
    weight = module.weight
    return F.rms_norm(x, weight.shape, weight, module.variance_epsilon)
