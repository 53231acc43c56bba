"""Memory and time of a step in this process, for both sides of a comparison. Linux alone; no packages."""

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Step:
    """Measures from its making on; what happens between `pause` and `resume` does not count."""

    rss_before: int = 0
    """Bytes of resident memory when the step began: the model, and whatever its side has loaded."""
    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)
    paused: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
        self.rss_before = _status("VmRSS")

    def peak(self) -> int:
        """Most bytes of resident memory since the step began."""
        return _status("VmHWM")

    def pause(self) -> None:
        self.paused = (time.perf_counter(), time.process_time())

    def resume(self) -> None:
        self.wall += time.perf_counter() - self.paused[0]
        self.cpu += time.process_time() - self.paused[1]

    def seconds(self) -> dict[str, float]:
        return {"wall_s": time.perf_counter() - self.wall, "cpu_s": time.process_time() - self.cpu}


def _status(name: str) -> int:
    """Bytes that /proc/self/status gives for a name."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
