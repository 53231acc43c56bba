"""Tiny models of many families with random weights, in float64. Windows are shorter than the paths of the tests."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from transformers import AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WIDE: dict[str, Any] = SIZES | {"head_dim": 8}
MIXED: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}

FLAT: dict[str, Callable[[], Any]] = {
    "mistral": lambda: t.MistralConfig(**WIDE, sliding_window=3),
    "qwen2 with windows": lambda: t.Qwen2Config(**SIZES, **MIXED, use_sliding_window=True, max_window_layers=1),
    "qwen3 with windows": lambda: t.Qwen3Config(**WIDE, **MIXED, use_sliding_window=True, max_window_layers=1),
    "qwen3_moe": lambda: t.Qwen3MoeConfig(**WIDE, **EXPERTS, num_experts=4, moe_intermediate_size=16),
    "mixtral": lambda: t.MixtralConfig(**WIDE, **EXPERTS, num_local_experts=4, sliding_window=4),
    "gemma": lambda: t.GemmaConfig(**WIDE),
    "gemma2": lambda: t.Gemma2Config(
        **WIDE, **MIXED, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3_text": lambda: t.Gemma3TextConfig(**WIDE, **MIXED, query_pre_attn_scalar=16),
    "phi3": lambda: t.Phi3Config(**SIZES, sliding_window=3),
    "olmo2": lambda: t.Olmo2Config(**SIZES),
    "olmo3": lambda: t.Olmo3Config(**SIZES, **MIXED),
    "granite": lambda: t.GraniteConfig(
        **SIZES, attention_multiplier=0.3, logits_scaling=2.0, residual_multiplier=0.7, embedding_multiplier=3.0
    ),
    "smollm3": lambda: t.SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "glm4": lambda: t.Glm4Config(**WIDE),
    "cohere2": lambda: t.Cohere2Config(**WIDE, **MIXED, logit_scale=0.5),
    "gpt_oss": lambda: t.GptOssConfig(**WIDE, **MIXED, **EXPERTS, num_local_experts=4),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4, "head_dim": 4},
        **EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
    ),
    "gpt2": lambda: t.GPT2Config(vocab_size=48, n_embd=24, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3),
}
"""Attention plus per-token parts."""

ROWS: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: t.Mamba2Config(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1, expand=2
    ),
    "falcon_h1": lambda: t.FalconH1Config(
        **WIDE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    ),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **WIDE,
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}
"""Layers that carry state along a row."""


def build(family: str, *, dtype: torch.dtype = torch.float64) -> Any:
    """The transformers module, with weights that are no special case: no bias is 0, no norm 1."""
    config = (FLAT | ROWS)[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for p in hf.parameters():
                p += 0.1 * torch.randn(p.shape, dtype=torch.float64).to(dtype)
    return hf
