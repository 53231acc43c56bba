"""The GPUs that torch sees on this machine."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One CUDA (or ROCm) device."""

    name: str
    memory_bytes: int
    """Total memory, used or not."""
    bfloat16: bool
    """Whether it computes in bfloat16 natively."""


def devices() -> list[Device]:
    """All devices in the order of their numbers; empty if torch sees none."""
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    ampere = 8  # the first generation with bfloat16 units
    return [
        Device(name=one.name, memory_bytes=one.total_memory, bfloat16=bool(torch.version.hip) or one.major >= ampere)
        for one in properties
    ]


def built_for() -> str | None:
    """The platform of this torch build, for example `CUDA 12.8`. None: CPU only."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None
