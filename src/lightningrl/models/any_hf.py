"""Any Hugging Face causal decoder, by its own forward. The caller provides the attention, where the layers allow it.

Two ways, which `models.families` chooses between:

- *flat*: layers are attention plus per-token parts. The tokens of a forest run once, as one row; our attention function
  (`hf_attention`) takes the place of the layers' own.
- *rows*: layers carry state along a row (Mamba, linear attention). Each path of the forest is a row of its own, and a
  token that several rows share is computed with each.

Legend: N tokens · D hidden size · V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightningrl.errors import UserError
from lightningrl.models.base import Attend, Decoder, eos_token_ids, trainable
from lightningrl.models.hf_attention import FLAT, Pass, make_checkpointable, run_flat
from lightningrl.models.hf_head import base_name, head_of, logits_by
from lightningrl.models.hf_rows import run_rows
from lightningrl.models.reach import depends_on_length, longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a survey of a model's forward has found."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    """Size of a head's values; the same as `head_size` in most families."""
    hidden_size: int
    vocab_size: int
    windows: tuple[int | None, ...]
    """Of each layer, as in `Style`. Empty for rows."""
    by_rows: str | None
    """Why the model runs by rows, for example `its layers carry state along a row`. None: it runs flat."""


class AnyHF:
    """A `Decoder` over a Hugging Face causal LM of any family."""

    def __init__(self, hf: Any, *, shape: Shape, adapter: Any = None, base: Decoder | None = None) -> None:
        """`adapter` and `base` as in `Decoder`. From now on the module is only to be run by this class."""
        self.hf = hf.eval()  # no dropout
        self.shape = shape
        self.adapter = adapter
        self.base = base
        self.layers = shape.layers
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_size = shape.head_size
        self.hidden_size = shape.hidden_size
        self.vocab_size = shape.vocab_size
        self.max_length = longest(hf.config)
        self._bounded = depends_on_length(hf.config)
        self._head, self._base = head_of(hf), base_name(hf)
        if shape.by_rows is None:
            hf.set_attn_implementation(FLAT)
            make_checkpointable(hf)

    @property
    def no_cache(self) -> str | None:
        """See `Decoder.no_cache`."""
        if self.shape.by_rows is None and self.shape.value_size != self.shape.head_size:
            return "its keys and values have different sizes"
        return self.shape.by_rows

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

    def frozen_copy(self) -> "AnyHF":
        """See `Decoder.frozen_copy`. The model must not have an adapter."""
        return AnyHF(copy.deepcopy(self.hf).requires_grad_(False), shape=self.shape)

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend, *, checkpointing: bool = False) -> Tensor:
        """See `Decoder.hidden`. A model that runs by rows takes the tokens of a forest, and does not use `attend`."""
        if self._bounded and int(positions.max()) >= self.max_length:
            raise UserError(
                f"the model's rotary embeddings change with the length beyond `{self.max_length}` tokens",
                hint="lower `engine.max_length`, or take a model with a longer `original_max_position_embeddings`",
            )
        base = getattr(self.hf, self._base)
        if self.shape.by_rows is not None:
            return run_rows(base, token_ids, positions, checkpointing=checkpointing)
        current = Pass(attend=attend, windows=self.shape.windows, checkpointing=checkpointing)
        return run_flat(base, token_ids, positions, current)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`. A family's own scale or cap is included."""
        return logits_by(self._head, hidden)
