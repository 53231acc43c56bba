"""On which device do models live? The GPUs that torch sees on this machine, and the choice among them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lightningrl.config import DeviceName
from lightningrl.errors import UserError
from lightningrl.models.memory import keep_freed_memory

CPU = torch.device("cpu")
FIRST_GPU = torch.device("cuda", 0)
INSTALL = "install torch's build for your GPU: https://pytorch.org/get-started/locally"


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


def memory_used(gpu: int) -> int:
    """Bytes of a GPU's memory that are in use, by any process."""
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free


def built_for() -> str | None:
    """The platform of this torch build, for example `CUDA 12.8`. None: CPU only."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else None


def device_of(name: DeviceName) -> torch.device:
    """The device that `trainer.device` names. `cuda` is the first GPU that torch sees, and `cuda:1` the second; `auto`
    is the first if it works, or else the CPU. Raises `UserError` for a GPU that is missing or does not work.
    """
    if name == "cpu":
        return CPU
    gpu = FIRST_GPU if name in ("auto", "cuda") else torch.device(name)
    error = _unusable(gpu, name=name)
    if error is None:
        return gpu
    if name == "auto":
        return CPU
    raise error


def set_up(devices: Iterable[torch.device]) -> None:
    """Set this process up for computing on these devices. Call it before anything is computed.

    On the CPU, freed memory is kept. On a GPU, float32 products are computed in float32: TF32 keeps 10 bits of the
    mantissa, but logprobs of engine and trainer must agree to 1e-4. cuBLAS gets the workspace with which equal calls
    give equal bits (docs.nvidia.com/cuda/cublas, "results reproducibility").
    """
    used = set(devices)
    if CPU in used:
        keep_freed_memory()
    if used - {CPU}:
        torch.set_float32_matmul_precision("highest")  # NVIDIA's containers lower it by an environment variable
        torch.backends.cudnn.allow_tf32 = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _unusable(gpu: torch.device, *, name: DeviceName) -> UserError | None:
    """Why torch cannot compute on this GPU, which a setting calls `name`; None: it can."""
    where, build = f"`trainer.device` is `{name}`", built_for()
    otherwise = 'or set `trainer.device = "cpu"`'
    if build is None:
        return UserError(f"{where}, but this build of torch is for the CPU only", hint=f"{INSTALL}; {otherwise}")
    if not torch.cuda.is_available():
        hint = f"try `nvidia-smi`: is there a GPU, and a driver for {build}? does `CUDA_VISIBLE_DEVICES` hide it?"
        return UserError(f"{where}, but torch (built for {build}) sees no GPU", hint=f"{hint} {otherwise}")
    if gpu.index >= (count := torch.cuda.device_count()):
        hint = f"the last one is `cuda:{count - 1}`; does `CUDA_VISIBLE_DEVICES` hide others?"
        return UserError(f"{where}, but torch sees {count} GPU{'s' if count > 1 else ''}", hint=hint)
    try:
        torch.ones(1, device=gpu).add(1).item()
    except RuntimeError as error:  # for example, the build has no kernels for this generation of GPUs
        reason = str(error).strip().partition("\n")[0]
        return UserError(f"{where}, but `{gpu}` cannot compute: {reason}", hint=f"{INSTALL}; {otherwise}")
    return None
