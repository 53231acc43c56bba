"""How much CPU time does each part of a run use? Reads the clocks of the operating system.

    agents      processes that run agents, and their children: framework, tools, reward function, MCP servers
    engine      threads named `engine-…`, and servers that the run has started; servers elsewhere are not counted
    gateway     the rest of this process while agents run: HTTP, rendering, records, dispatching, making tasks
    training    the rest of this process from a complete batch to the publication of the new weights
    rest        everything before and after: imports, loading the model; also threads named `drawing…`, and the page

Time spent waiting, for the GIL or for a core, is not counted. Torch's threads have no names, so they count to the part
that runs at the time. The time of a process that outlives its parent and is killed with its group is lost. Only Linux
provides these clocks; elsewhere there are no figures.
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
"""Prefix of the names of threads that draw."""
PARTS = ("agents", "gateway", "engine", "training", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """CPU seconds since the process began."""

    process: float
    """All threads of this process."""
    engine: float
    """Engine threads of this process."""
    drawing: float
    """Drawing threads of this process."""
    servers: float
    """Processes given to `count_as_engine`, with their descendants."""
    pages: float
    """Processes given to `count_as_rest`, with their descendants."""
    agents: float
    """Other descendants of this process, running or waited for."""


_servers: dict[int, float] = {}
_pages: dict[int, float] = {}
"""Process id of an engine's server, or of a page → its CPU seconds when it was last seen."""


def count_as_engine(process: int) -> None:
    """Count a child of this process, and all that it starts, as engine: before that it would count as an agent."""
    _servers[process] = 0.0


def count_as_rest(process: int) -> None:
    """Count a child of this process, and all that it starts, as rest."""
    _pages[process] = 0.0


class CpuSplit:
    """Sums the CPU time of each part since the beginning of the process."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = dict.fromkeys(PARTS, 0.0) if sys.platform == "linux" else {}
        self._last = Clocks(process=0.0, engine=0.0, drawing=0.0, servers=0.0, pages=0.0, agents=0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Part → CPU seconds up to the last lap; empty if the system has no such clocks."""
        return dict(self._spent)

    def lap(self, doing: Doing) -> None:
        """Count the time of this process since the last lap, except for engines, to the part `doing`."""
        if sys.platform != "linux":
            return
        now, last = clocks(), self._last
        # A thread or process that has ended is no longer counted, so a difference can be negative.
        engine, agents = max(0.0, now.engine - last.engine), max(0.0, now.agents - last.agents)
        drawing, servers = max(0.0, now.drawing - last.drawing), now.servers - last.servers
        ours, rest = now.process - last.process - engine - drawing, drawing + now.pages - last.pages
        for part, seconds in (("agents", agents), ("engine", engine + servers), ("rest", rest), (doing, ours)):
            self._spent[part] += seconds
        self._last = now

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """CPU seconds since `seconds` had the value `before`, as metrics."""
        return {f"cpu/{part}_s": self._spent[part] - seconds for part, seconds in before.items()}


if sys.platform == "linux":

    def clocks() -> Clocks:
        """Current clocks. Those of descendants have a resolution of 10 ms, the others of a nanosecond."""
        ended, living = resource.getrusage(resource.RUSAGE_CHILDREN), _living()
        for known in (_servers, _pages):
            known.update((process, living[process]) for process in known.keys() & living.keys())
        servers, pages = sum(_servers.values()), sum(_pages.values())
        return Clocks(
            process=time.process_time(),
            engine=_threads("engine-"),
            drawing=_threads(DRAWING),
            servers=servers,
            pages=pages,
            agents=ended.ru_utime + ended.ru_stime + sum(living.values()) - servers - pages,
        )

    def _threads(prefix: str) -> float:
        """CPU seconds of the running threads whose names begin with `prefix`."""
        idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith(prefix) and thread.ident]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def _living() -> dict[int, float]:
    """Child → CPU seconds of it and of its running descendants, and of the processes that they have waited for."""
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
    ours, found = os.getpid(), dict[int, float]()
    for pid, used in ticks.items():
        child = pid
        while parent_of.get(child, ours) != ours:
            child = parent_of[child]
        if child in parent_of:
            found[child] = found.get(child, 0.0) + used / os.sysconf("SC_CLK_TCK")
    return found
