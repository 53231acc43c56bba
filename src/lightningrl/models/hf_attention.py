"""The attention of Hugging Face's decoder layers, handed on to an `Attend`. Importing this registers it there.

A layer projects and rotates, and then calls the attention function that its configuration names. Ours receives the
pass that it belongs to as the keyword argument `PASS` of the model's forward, which every layer hands on. So threads
can share one module, and a block that is computed again in the backward pass finds its `Attend` on any thread.

Legend: N tokens · H query heads · K key/value heads · E head size · F value size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function
from transformers.modeling_layers import GradientCheckpointingLayer

from lightningrl.models.base import Attend, Style

PASS = "lightningrl"
FLAT = "lightningrl"
"""Name of the attention over flat tokens. It has no masks: windows are those of `Pass`."""
SURVEYED = "lightningrl-surveyed"
"""Name of the same attention with windows read from the masks, for a survey of a model."""


class Unlike(Exception):
    """A model's layers are not attention plus per-token parts, or their attention is not one that `Style` describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What all layers share in one forward pass."""

    attend: Attend
    windows: tuple[int | None, ...] | None
    """Of each layer; None: as its mask says."""
    checkpointing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Stands for a causal mask."""

    window: int | None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1 H N E], key [1 K N E], value [1 K N F] → [1 N H F]. `others` repeat what `Pass` or the mask says."""
    current: Pass | None = others.get(PASS)
    if current is None:
        raise Unlike("its layers do not hand on keyword arguments")
    if current.windows is not None:
        window = current.windows[module.layer_idx]
    elif isinstance(attention_mask, Mask):
        window = attention_mask.window
    else:
        raise Unlike("it makes its attention masks itself")
    style = Style(scale=scaling, softcap=softcap, window=window, sinks=s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return current.attend(module.layer_idx, q, k, v, style)[None], None


def mask_of(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    """The window of a mask [.. q k]. Raises `Unlike` for a mask that is neither causal nor a causal window."""
    if mask_function is causal_mask_function:
        return Mask(window=None)
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    w = local_size
    # in chunks of w tokens, the other kind of local attention, token w does not see token 1
    if w is None or sees(w, 0) or not sees(w, 1) or not sees(w, w) or sees(w, w + 1):
        raise Unlike("its attention is neither causal nor within a window")
    return Mask(window=w)


AttentionInterface.register(FLAT, _attention)
AttentionInterface.register(SURVEYED, _attention)
AttentionMaskInterface.register(SURVEYED, mask_of)


def run_flat(base: Any, token_ids: Tensor, positions: Tensor, current: Pass) -> Tensor:
    """[N D] final hidden states of flat tokens [N], as one row of a base model of Hugging Face. Their positions [N]
    need not grow.
    """
    mask = torch.ones_like(token_ids)[None] if current.windows is None else None  # else positions would split the row
    output = base(
        input_ids=token_ids[None],
        attention_mask=mask,
        position_ids=positions[None],
        use_cache=False,
        **{PASS: current},
    )
    return output.last_hidden_state[0]


def make_checkpointable(hf: Any) -> None:
    """Let `Pass.checkpointing` decide whether a block of `hf` keeps its activations for the backward pass.

    transformers' own switch is an attribute of the module, which engine and trainer share.
    """
    for module in hf.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = partial(_block, module)  # a deep copy of the module refers to the copy


def _block(module: nn.Module, *arguments: Any, **settings: Any) -> Any:
    forward = partial(type(module).forward, module)
    current: Pass | None = settings.get(PASS)
    if current is None or not current.checkpointing:
        return forward(*arguments, **settings)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **settings)
