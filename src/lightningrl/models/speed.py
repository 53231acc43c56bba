"""How fast does this machine multiply matrices and read memory? Measured in a moment, for estimates."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

REPEATS = 3
"""Runs of each measurement; the fastest counts."""
SIZE = {"cpu": 768, "cuda": 8192}
"""Rows and columns of the matrices, by type of device."""
COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Bytes that are copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one device."""

    bandwidth: float
    """Bytes read or written in a second."""
    flops: float
    """FLOP/s of a matrix product."""


def measure(device: torch.device, *, dtype: str, threads: int) -> Speed:
    """The speed of a device now, for numbers of this dtype; on the CPU with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        n = SIZE[device.type]
        a = torch.ones(n, n, dtype=getattr(torch, dtype), device=device)
        block = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
        return Speed(
            bandwidth=2 * block.nbytes / _fastest(lambda: block.clone(), device),
            flops=2 * n**3 / _fastest(lambda: a @ a, device),
        )
    finally:
        torch.set_num_threads(before)


def _fastest(compute: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    found: list[float] = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])
