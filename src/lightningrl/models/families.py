"""Which way does a model run? `DenseModel` for the families that it knows; else `AnyHF`, flat where that is right.

A survey runs a few tokens of a branching forest flat, with the model's own weights, and compares their hidden states
with Hugging Face's own forward of each path. So what decides is what the layers do, not what the family is called.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightningrl.errors import UserError
from lightningrl.models.any_hf import AnyHF, Shape
from lightningrl.models.base import PLAIN, Decoder, Style
from lightningrl.models.dense import DenseModel, is_dense
from lightningrl.models.forest_attention import ForestAttention
from lightningrl.models.hf_attention import SURVEYED, Pass, Unlike, run_flat
from lightningrl.models.hf_experts import use_experts
from lightningrl.models.hf_head import base_name, head_of, logits_by
from lightningrl.models.hf_rows import rows_of, run_row

POSITIONS = (0, 1, 2, 3, 4, 3, 4, 5, 1, 2, 0, 1)
"""The survey's forest: tokens depth first, with their distances from the root. Two roots; one branches twice."""
STARTS, PARENTS = (0, 1, 3, 5, 8, 10), (-1, 0, 1, 1, 0, -1)
"""Its segments, as in `Forest`."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest relative error of a hidden state that rounding makes. Attention that is not understood makes about 1."""
COARSE = 0.1
"""The same for 16-bit numbers."""
KINDS = {"full_attention", "sliding_attention"}
"""Types of layers that attend as `Style` says. Sparse attention differs only from a length on that a survey lacks."""
CAUSAL = KINDS | {"chunked_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "sparse", "dense"}
"""Types of layers whose tokens never depend on later ones, in transformers' names."""
SELECTING = ("index_topk", "index_topk_blocks", "keep_window_size")
"""Settings of attention that selects some tokens of a long row. Selections of transformers may depend on later tokens,
which the survey's short rows do not show.
"""
STATE = "its layers carry state along a row"

log = logging.getLogger(__name__)


def decoder_of(hf: Any) -> Decoder:
    """The `Decoder` over a Hugging Face causal LM. Raises `UserError` for one that is not causal."""
    if is_dense(hf.config):
        return DenseModel(hf)
    return AnyHF(hf, shape=survey(hf))


@torch.no_grad()
def survey(hf: Any) -> Shape:
    """How the model runs, and its sizes. From now on it computes experts by `hf_experts`."""
    _check_causal(hf)
    hf.eval()
    use_experts(hf)
    token_ids, expected = _reference(hf)
    config = hf.config.get_text_config()
    sizes = {"hidden_size": expected.shape[1], "vocab_size": logits_by(head_of(hf), expected[:1]).shape[1]}
    before = hf.config._attn_implementation
    try:
        return _flat_shape(hf, token_ids, expected, sizes)
    except Unlike as reason:
        log.warning("`%s`: each call is trained as a row, shared prefixes included: %s", config.model_type, reason)
        return Shape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_attention_heads", None) or 1,
            kv_heads=getattr(config, "num_attention_heads", None) or 1,
            head_size=0,
            value_size=0,
            windows=(),
            by_rows=str(reason),
            **sizes,
        )
    finally:
        hf.set_attn_implementation(before)


def _check_causal(hf: Any) -> None:
    """Raises `UserError` for a model whose configuration does not say that its layers are causal at any length."""
    config = hf.config.get_text_config()
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - CAUSAL)
    selecting = [name for name in SELECTING if getattr(config, name, None)]
    if unknown or selecting:
        what = f"layers of type `{unknown[0]}`" if unknown else f"attention that selects tokens (`{selecting[0]}`)"
        raise UserError(
            f"models of type `{config.model_type}` are not supported: they have {what}",
            hint="give a model without sparse attention",
        )


def _reference(hf: Any) -> tuple[Tensor, Tensor]:
    """The forest's token ids [N], and their hidden states [N D] by Hugging Face's own forward of each path."""
    token_ids = (torch.arange(len(POSITIONS), device=hf.device) * 7 + 5) % hf.config.get_text_config().vocab_size
    rows, base = rows_of(np.array(POSITIONS, dtype=np.int32)), getattr(hf, base_name(hf))
    states: dict[int, Tensor] = {}
    for row in rows:
        for token, state in zip(
            row.tolist(), run_row(base, token_ids[torch.from_numpy(row).to(hf.device)]), strict=True
        ):
            if token in states and _error(state, states[token]) > _tolerance(hf):
                raise UserError(
                    f"models of type `{hf.config.model_type}` are not supported: a token depends on later ones",
                    hint="give a causal language model",
                )
            states[token] = state
    return token_ids, torch.stack([states[token] for token in range(len(POSITIONS))])


def _flat_shape(hf: Any, token_ids: Tensor, expected: Tensor, sizes: dict[str, int]) -> Shape:
    """The shape of a model that runs flat. Raises `Unlike` for any other."""
    if not hf._can_set_attn_implementation():
        raise Unlike("its attention does not go through transformers' interface")
    other = set(getattr(hf.config.get_text_config(), "layer_types", None) or []) - KINDS
    if other:
        raise Unlike(f"it has layers of type `{min(other)}`")
    seen: dict[int, tuple[tuple[int, int, int, int], int | None]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN, /) -> Tensor:
        if layer in seen:
            raise Unlike("a layer has several attentions")
        seen[layer] = ((q.shape[1], k.shape[1], q.shape[2], v.shape[2]), style.window)
        return ForestAttention(
            np.array([*STARTS, len(POSITIONS)]),
            np.array(PARENTS),
            np.array(POSITIONS),
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dtype=q.dtype,
            device=q.device,
        )(layer, q, k, v, style)

    hf.set_attn_implementation(SURVEYED)
    positions = torch.tensor(POSITIONS, device=hf.device)
    try:
        found = run_flat(getattr(hf, base_name(hf)), token_ids, positions, Pass(attend=attend, windows=None))
    except (AttributeError, TypeError) as error:  # it takes no further keyword arguments, or computes with masks
        raise Unlike(f"its forward cannot be run flat: {error}") from error
    if sorted(seen) != list(range(hf.config.get_text_config().num_hidden_layers)):
        raise Unlike(STATE)
    if len({shape for shape, _ in seen.values()}) > 1:
        raise Unlike("its layers have heads of different sizes")
    if _error(found, expected) > _tolerance(hf):
        raise Unlike(STATE)
    heads, kv_heads, head_size, value_size = seen[0][0]
    return Shape(
        layers=len(seen),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=value_size,
        windows=tuple(seen[layer][1] for layer in range(len(seen))),
        by_rows=None,
        **sizes,
    )


def _error(found: Tensor, expected: Tensor) -> float:
    """The relative error of hidden states [.. D] that a quarter exceeds: few tokens may choose other experts."""
    wide = torch.promote_types(found.dtype, torch.float32)
    found, expected = found.to(wide), expected.to(wide)
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).quantile(0.75))


def _tolerance(hf: Any) -> float:
    return TOLERANCE.get(hf.dtype, COARSE)
