"""The arithmetic of memory, against what autograd really saves on the CPU."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightningrl.models.base import Decoder
from lightningrl.models.dense import DenseModel
from lightningrl.models.families import decoder_of
from lightningrl.models.footprint import (
    cache_bytes,
    gathered_bytes,
    head_bytes,
    held,
    layer_bytes,
    shape_of,
    token_bytes,
    tokens_in,
)
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.models.lora import with_adapter

TOKENS = 384
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    hidden: int = 128
    intermediate: int = 384
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16


WIDE = Sizes(hidden=96, intermediate=512, heads=6, kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(family: str, sizes: Sizes, *, dtype: torch.dtype, rank: int, layers: int) -> Decoder:
    make_config, make_model = FAMILIES[family]
    config = make_config(
        vocab_size=300,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )
    model = DenseModel(make_model(config).to(dtype).eval())
    return with_adapter(model, rank=rank) if rank else model


def other_model(family: str, *, rank: int, layers: int) -> Decoder:
    """A model that `AnyHF` runs, in bfloat16."""
    config = AutoConfig.for_model(
        family,
        vocab_size=300,
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=layers,
        head_dim=16,
        pad_token_id=0,
    )
    model = decoder_of(AutoModelForCausalLM.from_config(config).to(torch.bfloat16))
    return with_adapter(model, rank=rank) if rank else model


def line(model: Decoder, tokens: int) -> tuple[Tensor, Tensor, ForestAttention]:
    """Ids, positions and attention of one sequence."""
    positions = torch.arange(tokens)
    attend = ForestAttention(
        np.array([0, tokens]),
        np.array([-1]),
        positions.numpy(),
        heads=model.heads,
        kv_heads=model.kv_heads,
        dtype=model.dtype,
        device=model.device,
    )
    return torch.zeros(tokens, dtype=torch.long), positions, attend


def saved_bytes(model: Decoder) -> int:
    """Bytes of the distinct storages that a forward pass over one line of tokens saves, without the model's own."""
    own = {p.untyped_storage().data_ptr() for p in model.hf.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own and TOKENS in tensor.shape:  # not the adapter's matrices in another dtype
            saved[pointer] = tensor
        return tensor

    token_ids, positions, attend = line(model, TOKENS)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(token_ids, positions, attend)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "sizes"), [*((family, Sizes()) for family in FAMILIES), ("qwen3", WIDE)])
def test_a_layer_saves_what_the_arithmetic_says(family: str, sizes: Sizes, dtype: torch.dtype, rank: int) -> None:
    few, many = (model_of(family, sizes, dtype=dtype, rank=rank, layers=layers) for layers in (1, 3))
    measured = (saved_bytes(many) - saved_bytes(few)) / 2 / TOKENS
    shape = shape_of(few.hf.config)
    assert layer_bytes(shape, itemsize=dtype.itemsize, rank=rank, fused=False) == pytest.approx(measured, rel=0.02)


def peak_bytes(model: Decoder, tokens: int, *, checkpointing: bool) -> int:
    """The most bytes at once that a forward and backward pass allocates, as torch's profiler records it."""
    token_ids, positions, attend = line(model, tokens)

    def step() -> None:
        model.hidden(token_ids, positions, attend, checkpointing=checkpointing).float().sum().backward()

    step()  # from here on, gradients have their place
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in cast(Any, recorded).profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3", "olmo3", "cohere2"])
def test_a_layer_of_another_family_saves_about_as_much(family: str, rank: int) -> None:
    few, many = (other_model(family, rank=rank, layers=layers) for layers in (2, 4))
    measured = (saved_bytes(many) - saved_bytes(few)) / 2 / TOKENS
    expected = layer_bytes(shape_of(few.hf.config), itemsize=2, rank=rank, fused=False)
    assert expected == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("dtype", "rank", "checkpointing"),
    [(torch.float32, 0, False), (torch.bfloat16, 16, True)],
)
def test_a_step_takes_as_many_bytes_a_token_as_the_arithmetic_says(
    dtype: torch.dtype, rank: int, checkpointing: bool
) -> None:
    sizes = Sizes(hidden=256, intermediate=768, head_dim=32)
    model = model_of("qwen3", sizes, dtype=dtype, rank=rank, layers=2)
    few, many = (peak_bytes(model, tokens, checkpointing=checkpointing) for tokens in (512, 1024))
    expected = token_bytes(
        shape_of(model.hf.config), itemsize=dtype.itemsize, rank=rank, checkpointing=checkpointing, fused=False
    )
    assert expected == pytest.approx((many - few) / 512, rel=0.05)


def test_checkpointing_saves_the_input_of_each_layer_alone() -> None:
    shape = shape_of(model_of("qwen3", Sizes(), dtype=torch.float32, rank=0, layers=1).hf.config)
    deep = [
        token_bytes(replace(shape, layers=layers), itemsize=2, rank=16, checkpointing=True, fused=True)
        for layers in (10, 11)
    ]
    assert deep[1] - deep[0] == 2 * shape.hidden


def test_full_training_holds_16_bytes_a_weight_in_float32_and_20_in_bfloat16() -> None:
    whole = held(parameters=1000, learning=1000, itemsize=4, reference=False)
    assert (whole.weights, whole.masters, whole.gradients, whole.moments) == (4000, 0, 4000, 8000)
    narrow = held(parameters=1000, learning=1000, itemsize=2, reference=True)
    assert narrow.total == 20 * 1000 + narrow.reference == 22 * 1000


def test_an_adapter_needs_no_reference_and_its_base_has_no_gradient() -> None:
    found = held(parameters=1000, learning=10, itemsize=2, reference=True)
    assert (found.weights, found.masters, found.gradients, found.moments, found.reference) == (2000, 40, 40, 80, 0)


def test_tokens_fill_the_free_bytes() -> None:
    assert tokens_in(1000, per_token=300) == 3
    assert tokens_in(-5, per_token=300) == 0


def test_keys_values_and_logits_are_counted() -> None:
    shape = shape_of(model_of("qwen3", WIDE, dtype=torch.float32, rank=0, layers=3).hf.config)
    assert gathered_bytes(shape, itemsize=2, keys=10) == 2 * 10 * (4 * shape.kv_width + 2 * shape.q_width)
    assert cache_bytes(shape, tokens=10, itemsize=2) == 2 * 3 * 64 * 2 * 10
    assert head_bytes(shape, itemsize=2, rank=16, rows=8) == 8 * 300 * 12
    assert head_bytes(shape, itemsize=2, rank=16, rows=256) == 256 * 300 * 4 + 128 * 300 * 8
    assert head_bytes(shape, itemsize=2, rank=0, rows=8) == 8 * 300 * 12 + 300 * 96 * 6
