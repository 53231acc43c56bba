"""Where does the CPU of a run go? Clocks of the operating system in, seconds of each part out.

agents      the processes that run them and whatever these start: framework, tools, reward function, servers of MCP
engine      threads called `engine-…`; an engine in another process is not counted
gateway     everything else in this process while agents run: HTTP, rendering, records, handing out rollouts, making up
tasks training    everything else from a complete batch to the new weights being served: credit, forest, forward,
backward, update, saving rest        everything else, before and after: imports, loading the model; and threads called
`drawing…`, at any time

Waiting is in none of these, be it for the GIL or for a core. Torch's own threads have no names, so they count by what
the process is doing: those of a product in the trainer as training. What a process has spent that outlived its parent
and was ended with its group is lost. Only Linux tells all of this; elsewhere there are no figures.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Doing: TypeAlias = Literal["gateway", "training", "rest"]
DRAWING = "drawing"
"""How the name of a thread begins that draws."""
PARTS = ("agents", "gateway", "engine", "training", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Seconds of CPU so far."""

    process: float
    """All threads of this process."""
    engine: float
    """Those of them that are engines."""
    drawing: float
    """Those of them that draw."""
    agents: float
    """Descendants of this process, alive or waited for."""


class CpuSplit:
    """Adds up, from the beginning of the process, what each part has spent."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = dict.fromkeys(PARTS, 0.0) if sys.platform == "linux" else {}
        self._last = Clocks(process=0.0, engine=0.0, drawing=0.0, agents=0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Part → what it had spent at the end of the last lap; empty where the system does not tell."""
        return dict(self._spent)

    def lap(self, doing: Doing) -> None:
        """What this process has done since the last lap, engines aside, was `doing`."""
        if sys.platform != "linux":
            return
        now, last = clocks(), self._last
        engine, agents = (
            max(0.0, now.engine - last.engine),
            max(0.0, now.agents - last.agents),
        )  # who has ended is seen no more
        drawing = max(0.0, now.drawing - last.drawing)
        ours = now.process - last.process - engine - drawing
        for part, seconds in (("agents", agents), ("engine", engine), ("rest", drawing), (doing, ours)):
            self._spent[part] += seconds
        self._last = now

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """What has been spent since `seconds` was `before`, as metrics."""
        return {f"cpu/{part}_s": self._spent[part] - seconds for part, seconds in before.items()}


if sys.platform == "linux":

    def clocks() -> Clocks:
        """As the kernel has them: of descendants to a hundredth of a second, else to the nanosecond."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Clocks(
            process=time.process_time(),
            engine=_threads("engine-"),
            drawing=_threads(DRAWING),
            agents=ended.ru_utime + ended.ru_stime + _living(),
        )

    def _threads(prefix: str) -> float:
        """Seconds of the threads that are there and are called so."""
        idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith(prefix) and thread.ident]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def _living() -> float:
    """Seconds of the descendants that are there, and of all that they have waited for."""
    parent_of: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()  # proc(5), from `state`, the third, on
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            pid = int(entry.name)
            parent_of[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    ours, found = os.getpid(), 0
    for pid in ticks:
        ancestor = parent_of[pid]
        while ancestor in parent_of and ancestor != ours:
            ancestor = parent_of[ancestor]
        found += ticks[pid] if ancestor == ours else 0
    return found / os.sysconf("SC_CLK_TCK")
