"""What has been run, and how did it end? A run's state, progress, held-out reward and settings, from its folder."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightningrl.config import Config
from lightningrl.look.journal import Row
from lightningrl.look.process import RESULT, process_of
from lightningrl.store.place import FILE, NAMED
from lightningrl.types import RolloutStatus

State: TypeAlias = Literal["running", "complete", "stopped"]
CHANGING = ("metrics.jsonl", FILE, f"{FILE}-wal", RESULT, "config.toml")
"""Files that change while a run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heldout:
    """Mean reward on held-out tasks, sampled at temperature 1. None: not measured yet."""

    before: float | None
    latest: float | None
    after: float | None
    low: float | None
    high: float | None
    """95 % interval of `latest`."""
    learnt: Literal["yes", "no", "worse"] | None
    """None: the run is not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, in a line of a list."""

    run: str
    """Name of its folder, made unique."""
    recipe: str | None
    """None: it has no settings, or they cannot be read."""
    path: str
    state: State
    began_at: float
    changed_at: float
    """Unix seconds."""
    seconds: float
    """How long it went on, without the time from a stop to a resumption."""
    steps: int | None
    """Steps to take; None: it is no training run."""
    step: int
    """Steps taken."""
    policies: tuple[str, ...]
    heldout: Heldout
    rollouts: int | None
    """None: it has no records yet."""
    counts: Mapping[RolloutStatus, int]
    """Status → number of rollouts."""
    error: str | None
    """Why its records cannot be read; None: they can, or there are none yet."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def is_run(folder: Path) -> bool:
    """Whether the folder has a run's settings or records."""
    return any((folder / name).is_file() for name in ("config.toml", FILE, NAMED))


def signature(folder: Path) -> tuple[Any, ...]:
    """A value that changes when the run does. What a database at another place holds is not looked at."""
    found = [(folder / name) for name in CHANGING]
    stats = [path.stat() if path.exists() else None for path in found]
    return (process_of(folder), *((stat.st_mtime_ns, stat.st_size) if stat else None for stat in stats))


def run_of(
    folder: Path,
    config: Config | None,
    rows: Sequence[Row],
    *,
    name: str,
    counts: Mapping[RolloutStatus, int] | None,
    error: str | None = None,
) -> Run:
    """The run in a folder. `rows`: of its metrics. `counts`: of its rollouts; None: it has no records that can be read,
    and `error` says why.
    """
    result = result_of(folder)
    stats = [path.stat() for part in CHANGING if (path := folder / part).exists()]
    times = [stat.st_mtime for stat in stats if stat.st_size]  # SQLite makes an empty log for those who read
    began = [row["at"] for row in rows if row["kind"] == "began" and row["step"] == 0 and "at" in row]
    began_at = began[0] if began else min(times, default=folder.stat().st_mtime)
    changed_at = max(times, default=folder.stat().st_mtime)
    return Run(
        run=name,
        recipe=None if config is None else config.name,
        path=str(folder),
        state=state_of(folder),
        began_at=began_at,
        changed_at=changed_at,
        seconds=max(0.0, changed_at - began_at - _pauses(rows)),
        steps=None if config is None else config.loop.steps,
        step=sum(row["kind"] == "step" for row in rows),
        policies=() if config is None else tuple(config.learners()),
        heldout=_heldout(rows, result),
        rollouts=None if counts is None else sum(counts.values()),
        counts=counts or {},
        error=error,
    )


def state_of(folder: Path) -> State:
    if process_of(folder) is not None:
        return "running"
    return "complete" if (folder / RESULT).is_file() else "stopped"


def result_of(folder: Path) -> dict[str, Any] | None:
    """The result of a run that is complete, as `train --json` prints it; else None, also if its file is damaged."""
    try:
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def resume_command(folder: Path) -> str:
    """The command that continues the run in this folder."""
    return shlex.join(["lightningrl", "train", str(folder / "config.toml"), "--run-dir", str(folder), "--resume"])


def _pauses(rows: Sequence[Row]) -> float:
    """Seconds from the last row of a process to the beginning of the next one, summed up."""
    told = [row for row in rows if "at" in row]
    return sum(max(0.0, row["at"] - before["at"]) for before, row in pairwise(told) if row["kind"] == "began")


def _heldout(rows: Sequence[Row], result: Mapping[str, Any] | None) -> Heldout:
    exams = [row for row in rows if row["kind"] == "exam" and row.get("mode") == "sampled"]
    latest = exams[-1] if exams else {}
    return Heldout(
        before=next((row.get("reward/mean") for row in exams if row["step"] == 0), None),
        latest=latest.get("reward/mean"),
        after=result.get("heldout_after") if result else None,
        low=latest.get("reward/low"),
        high=latest.get("reward/high"),
        learnt=result.get("learnt") if result else None,
    )
