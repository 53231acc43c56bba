"""What can a device do? Memory, bandwidth and peak of known GPUs, from their data sheets.

`memory_bytes` is what torch reports as total, rounded down: less than the data sheet says. `peaks` are FLOP/s of dense
matrix products (without sparsity) with float32 sums. float32 is without TF32, which the project switches off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, or the CPU of this machine with its memory."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Bytes that it reads from its memory in a second."""
    peaks: Mapping[str, float]
    """dtype → FLOP/s of matrix products."""
    is_gpu: bool = True
    count: int = 1
    """GPUs of the machine, all of this kind."""
    host_bytes: int | None = None
    """Memory of the machine around a GPU; None: unknown."""
    flash: bool = False
    """Whether torch has its kernel of attention for it: from compute capability 8.0 on."""
    bfloat16: bool = True
    """Whether vLLM computes in bfloat16 on it: from compute capability 8.0 on."""
    is_measured: bool = False
    """Whether bandwidth and peaks are measured on this machine; else they are from a data sheet."""

    @property
    def kind(self) -> str:
        """Type of the device, as torch names it."""
        return "cuda" if self.is_gpu else "cpu"


CARDS: Mapping[str, Card] = {
    # nvidia.com/en-us/data-center/h100: SXM, 80 GB
    "h100": Card(
        name="H100 80 GB",
        memory_bytes=79 * GIB,
        bandwidth=3.35e12,
        peaks={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
        flash=True,
    ),
    # nvidia.com/en-us/data-center/a100: SXM, 80 GB
    "a100": Card(
        name="A100 80 GB",
        memory_bytes=79 * GIB,
        bandwidth=2.04e12,
        peaks={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        flash=True,
    ),
    # nvidia.com/en-us/data-center/l4: half of the rate with sparsity
    "l4": Card(
        name="L4 24 GB",
        memory_bytes=22 * GIB,
        bandwidth=300e9,
        peaks={"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12},
        flash=True,
    ),
    # NVIDIA Ada GPU architecture, appendix A
    "4090": Card(
        name="RTX 4090 24 GB",
        memory_bytes=int(23.5 * GIB),
        bandwidth=1.008e12,
        peaks={"bfloat16": 165e12, "float16": 165e12, "float32": 82.6e12},
        flash=True,
    ),
    # nvidia.com/en-us/data-center/tesla-t4. It computes bfloat16 as float32.
    "t4": Card(
        name="T4 16 GB",
        memory_bytes=int(14.5 * GIB),
        bandwidth=320e9,
        peaks={"bfloat16": 8.1e12, "float16": 65e12, "float32": 8.1e12},
        bfloat16=False,
    ),
}
"""Name for `--gpu` → card."""
SLOWER = {"pcie", "nvl", "laptop", "d"}
"""Words in the names of slower cards of the same generation, e.g. `NVIDIA H100 PCIe`."""


def card_like(name: str, *, memory_bytes: int) -> Card | None:
    """The known card that a device's own name contains, e.g. `NVIDIA A100-SXM4-80GB`, with the memory that it has. None
    for other devices, and for one whose memory differs by more than 10 %.
    """
    words = set(name.lower().replace("-", " ").split())
    known = next((card for key, card in CARDS.items() if key in words), None)
    if known is None or words & SLOWER or not 0.9 < memory_bytes / known.memory_bytes < 1.1:
        return None
    return replace(known, name=name, memory_bytes=memory_bytes)
