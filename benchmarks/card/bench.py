"""What is measured where: the device, its clock and its memory, and the model of the measurements."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from lightningrl.models.base import Decoder
from lightningrl.models.tiny import build_model

QWEN3_06B = {
    "hidden": 1024,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "head_size": 128,
    "intermediate": 3072,
    "max_length": 40960,
}
"""The shape of Qwen3-0.6B; the weights are random."""
TINY = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 16, "intermediate": 128}


class Missing(Exception):
    """A part cannot be measured here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how to measure."""

    device: torch.device
    quick: bool
    """Run all code paths with tiny sizes; the figures mean nothing."""

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, or float32 on a CPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def shape(self) -> dict[str, int]:
        return TINY if self.quick else QWEN3_06B

    @property
    def vocabulary(self) -> int:
        return 300 if self.quick else 151_936

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of the longest call of a rollout."""
        return (96,) if self.quick else (2048, 8192, 32768)

    def synchronize(self) -> None:
        """Wait until the device has computed everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, compute: Callable[[], Any], *, repeats: int = 3, after: Callable[[], Any] | None = None) -> float:
        """The least time of some calls, after one to warm up. `after`: what follows each, and is not timed."""
        times: list[float] = []
        for _ in range(1 + (1 if self.quick else repeats)):
            self.synchronize()
            began = time.perf_counter()
            compute()
            self.synchronize()
            times.append(time.perf_counter() - began)
            if after is not None:
                after()
        return min(times[1:])

    def allocated(self) -> int:
        """Bytes of living tensors; 0 on a CPU, where torch does not count them."""
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def peak(self, compute: Callable[[], Any]) -> int:
        """Most bytes beyond those of before that are allocated at once; 0 on a CPU."""
        if self.device.type != "cuda":
            compute()
            return 0
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        compute()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def model(self) -> Decoder:
        """A model with random weights on the device, in `dtype`."""
        with self.device:
            model = build_model(self.vocabulary, **self.shape)
        for parameter in model.hf.parameters():
            parameter.data = parameter.data.to(self.dtype)
        return model


def need(*packages: str) -> None:
    """Raises `Missing` if one of these packages is not installed."""
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        raise Missing(f"not installed: {', '.join(absent)}")
