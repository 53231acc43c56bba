"""Equal bits for equal inputs on a GPU, where additions of many threads into one number come in any order."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.utils.deterministic

_errors = threading.RLock()
"""Held while `error` is set."""


@contextmanager
def repeatable(otherwise: Literal["warn", "error"]) -> Iterator[None]:
    """Compute with torch's deterministic algorithms within the block, in the whole process. `otherwise`: what torch
    does at an operation that has none. The flash-attention kernel is deterministic only under `error`.

    Only one thread may train. Others that compute on a GPU meanwhile do so in `undisturbed`.
    """
    with _errors if otherwise == "error" else nullcontext():
        yield from _repeatable(otherwise)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Compute on a device while no other thread is in `repeatable("error")`. A GPU's `cumsum`, for example, has no
    deterministic algorithm. On a CPU there is nothing to wait for.
    """
    with _errors if device.type == "cuda" else nullcontext():
        yield


def _repeatable(otherwise: Literal["warn", "error"]) -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch warns if cuBLAS may choose another
    torch.set_deterministic_debug_mode(otherwise)
    settings.fill_uninitialized_memory = False  # it costs time, and changes no result
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = filled
