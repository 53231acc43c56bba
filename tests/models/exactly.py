"""Compute in float64 where Hugging Face's code asks for float32: in norms, routers, softmax and rotary embeddings.

Its islands of float32 would hide errors below 1e-7. The mode changes what both sides of a comparison compute, alike.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """A context in which torch's functions take float64 for float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
