"""What do engines and trainers need of a language model? `Decoder`. Its caller provides the attention.

Tokens are flat, `[N]`, from any number of sequences. Only the attention knows which token attends to which: the
engine's works on its cache, the trainer's on a forest.

Legend: N tokens · D hidden size · H query heads · K key/value heads · E head size · V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Style:
    """How a layer attends, besides `softmax(q Kᵀ · scale) V` over all ancestors of a token and itself."""

    scale: float | None = None
    """Factor of the scores; None: 1 / √E."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap) (arXiv 2408.00118, section 2); None: they stay as they are."""
    window: int | None = None
    """A token attends to at most this many tokens of its path, itself included; None: to all."""
    sinks: Tensor | None = None
    """[H] one more logit in each head's softmax, without a value (arXiv 2309.17453); None: there is none."""


PLAIN = Style()


class Attend(Protocol):
    """Attention of N tokens over themselves and whatever the caller holds (a cache, a forest)."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN, /) -> Tensor:
        """q [N H E], k and v [N K E] of one layer → [N H E]"""
        ...


class Decoder(Protocol):
    """A causal language model over the tensors of a Hugging Face module. Engine and trainer may share it."""

    hf: Any
    """The transformers module. Its tensors are the model's; `save_pretrained` exports them."""
    adapter: Any
    """peft's configuration of the adapter (see `models.lora`); None without one."""
    base: "Decoder | None"
    """The same model without its adapter, over the same tensors; None without an adapter."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden_size: int
    vocab_size: int
    max_length: int
    """Longest sequence that the model was made for, in tokens."""

    @property
    def no_cache(self) -> str | None:
        """Why a token's keys and values are not all that later tokens need of it, or do not fit in the embedded
        engine's cache: then only other engines can serve the model. None: they are and do.
        """
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a completion."""
        ...

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend, *, checkpointing: bool = False) -> Tensor:
        """[N D] final hidden states of tokens [N] at positions [N], ready for `logits`. With `checkpointing`, the
        backward pass computes each layer again instead of keeping its activations (arXiv 1604.06174).
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [.. D] → logits [.. V]."""
        ...

    def trainable(self) -> dict[str, Tensor]:
        """The parameters that learn, by name: all, or the adapter's alone."""
        ...

    def frozen_copy(self) -> "Decoder":
        """The same model over copies of its tensors, which do not learn."""
        ...


def eos_token_ids(hf: Any) -> frozenset[int]:
    """The tokens that end a completion, from the model's generation configuration or else from its own."""
    ids = hf.generation_config.eos_token_id if hf.generation_config is not None else None
    ids = hf.config.eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def trainable(hf: Any) -> dict[str, Tensor]:
    """The parameters of a module that require a gradient, by name."""
    return {name: p for name, p in hf.named_parameters() if p.requires_grad}
