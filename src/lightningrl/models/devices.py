"""What can torch compute on here, apart from the CPU?"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One CUDA (or ROCm) device."""

    name: str
    memory_bytes: int
    """All of it, in use or not."""
    bfloat16: bool
    """Whether it computes in bfloat16 natively."""


def devices() -> list[Device]:
    """In the order of their numbers; empty where torch sees none."""
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    ampere = 8  # the first generation with bfloat16 units
    return [
        Device(name=one.name, memory_bytes=one.total_memory, bfloat16=bool(torch.version.hip) or one.major >= ampere)
        for one in found
    ]


def built_for() -> str | None:
    """What this build of torch can use: `CUDA 12.8`, say. None: the CPU only."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None
