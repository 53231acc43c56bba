"""Hidden states → logits by a Hugging Face model's own forward, with whatever it does beside its output matrix: scale,
cap, cast.

A copy of the outermost module shares all others with the model, except for the base model: in its place stands one that
returns the hidden states that it is given.
"""

import copy
from typing import Any

from torch import Tensor, nn


class _Output:
    """The output of a base model that computed nothing but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """In place of a base model, whose other attributes it has."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # not a child

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


def base_name(hf: Any) -> str:
    """The name of the base model within a causal LM: the child with the input embeddings."""
    embeddings = hf.get_input_embeddings()
    return next(name for name, child in hf.named_children() if any(m is embeddings for m in child.modules()))


def head_of(hf: Any) -> Any:
    """The module that turns hidden states [1 N D], as `inputs_embeds`, into an output with `logits` [1 N V]."""
    head, name = copy.copy(hf), base_name(hf)
    head._modules = hf._modules | {name: _Given(hf._modules[name])}
    return head


def logits_by(head: Any, hidden: Tensor) -> Tensor:
    """Hidden states [.. D] → logits [.. V]. Each depends on its own hidden state alone."""
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    logits = head(inputs_embeds=flat, use_cache=False).logits
    return logits.view(*hidden.shape[:-1], -1)
