"""A dense decoder (Qwen3, Qwen2, Llama) that lets its caller do the attention.

The weights are those of the Hugging Face module, not copies: engine and trainer share them, `save_pretrained` exports them, and an
adapter that wraps a projection is honoured. Tokens come flat, `[N]`, from any number of sequences; only attention knows which
token may look at which, so the engine brings one over its cache and the trainer one over a forest.

Legend: N tokens · D hidden size · H query heads · K key/value heads · E head size · V vocabulary.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightningrl.errors import UserError

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N H E], k [N K E], v [N K E]) → [N H E]"""

FAMILIES = ("qwen3", "qwen2", "llama")


class DenseModel:
    """A Hugging Face causal LM, run layer by layer."""

    def __init__(self, hf: Any) -> None:
        config = hf.config
        if config.model_type not in FAMILIES:
            known = ", ".join(f"`{f}`" for f in FAMILIES)
            raise UserError(f"models of type `{config.model_type}` are not supported", hint=f"dense models of these families are: {known}")
        sliding = [t for t in getattr(config, "layer_types", None) or [] if t != "full_attention"]
        if sliding:
            raise UserError(f"layers of type `{sliding[0]}` are not supported", hint="set `use_sliding_window` to false in the model's config.json")
        self.hf = hf
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.vocab_size: int = config.vocab_size
        self.max_length: int = config.max_position_embeddings
        self.normalises_heads: bool = config.model_type == "qwen3"

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [N D] of tokens [N] at positions [N]."""
        base = self.hf.model
        x = base.embed_tokens(token_ids)
        cos, sin = (t[0, :, None, :] for t in base.rotary_emb(x[None], positions[None]))
        for index, layer in enumerate(base.layers):
            y = layer.input_layernorm(x)
            x = x + self._attention(index, layer.self_attn, y, cos, sin, attend)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return base.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.. D] → [.. V]"""
        return self.hf.lm_head(hidden)

    def _attention(self, index: int, attn: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        N = x.shape[0]
        q = attn.q_proj(x).view(N, self.heads, self.head_size)
        k = attn.k_proj(x).view(N, self.kv_heads, self.head_size)
        v = attn.v_proj(x).view(N, self.kv_heads, self.head_size)
        if self.normalises_heads:
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return attn.o_proj(attend(index, q, k, v).reshape(N, self.heads * self.head_size))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [N heads E] by cos, sin [N 1 E] (arXiv 2104.09864, the half-split layout)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin
