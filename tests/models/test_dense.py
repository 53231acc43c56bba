"""`DenseModel` computes what Hugging Face computes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from lightningrl.models.base import PLAIN, Style
from lightningrl.models.dense import DenseModel, is_dense
from lightningrl.models.families import decoder_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor, _style: Style = PLAIN) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("config", [Qwen3Config(**SMALL, head_dim=8), Qwen2Config(**SMALL), LlamaConfig(**SMALL)])
def test_layer_by_layer_equals_hugging_face(config: object) -> None:
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model = DenseModel(hf)
    ids = torch.arange(20) * 7 % 64
    with torch.no_grad():
        mine = model.logits(model.hidden(ids, torch.arange(20), causal))
        torch.testing.assert_close(mine, hf(ids[None]).logits[0], rtol=0, atol=1e-6)


WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
DYNAMIC: dict[str, Any] = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}
PARTIAL: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
}


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        (Qwen3Config(**SMALL, head_dim=8), True),
        (Qwen3Config(**SMALL, head_dim=8, **WINDOWS), False),
        (LlamaConfig(**SMALL), True),
        (LlamaConfig(**SMALL, **DYNAMIC), False),
        (LlamaConfig(**SMALL, **PARTIAL), False),
        (MistralConfig(**SMALL), False),
    ],
)
def test_only_what_it_computes_correctly_is_dense(config: object, dense: bool) -> None:
    assert is_dense(config) == dense
    assert isinstance(decoder_of(AutoModelForCausalLM.from_config(config)), DenseModel) == dense
