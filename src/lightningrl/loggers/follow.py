"""How does a logger receive a run without slowing it down? A thread of its own reads the files of the run.

    metrics.jsonl   → rows   ┐
                             ├→ thread → logger → service
    store.sqlite    → ended  ┘            ↓
                                          loggers/NAME.json: how far it has come

The run never waits for a logger, and hands it nothing: what a slow logger has not read yet is on disk. A logger that
fails is tried again with the same records, and dropped after `FAILURES` failures in a row. The next start of the run
continues where the logger stopped.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from lightningrl.errors import StoreFailed
from lightningrl.loggers.base import Logger, Outcome, Refused, Run
from lightningrl.loggers.reading import Rollouts, Rows

LOOK_S = 1.0
"""Seconds between two looks at the files."""
FAILURES = 5
"""Failures in a row after which a logger is dropped."""
AWAY = 30
"""The same if the run's own database fails: a restart takes a while, and readers give up soon."""

Say: TypeAlias = Callable[[str], None]
"""Shows a line to the user; `; hint: ` separates a hint."""


class Follower:
    """One logger in its thread."""

    def __init__(self, name: str, logger: Logger, run: Run, *, say: Say, look_s: float = LOOK_S) -> None:
        self.name = name
        self._logger, self._run, self._say, self._look_s = logger, run, say, look_s
        self._rows = Rows(run.folder / "metrics.jsonl", run.notes)
        self._rollouts = Rollouts(run.folder, run.notes) if logger.reads_rollouts else None
        self._begun = False
        self._given_up = False
        self._outcome: Outcome | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"logger-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, outcome: Outcome) -> None:
        """Tell the thread that the run has ended. `wait` waits for it."""
        self._outcome = outcome
        self._ending.set()

    def wait(self, *, timeout_s: float) -> bool:
        """Whether the thread has ended within that time. If not, it stops after the record at hand."""
        self._thread.join(timeout_s)
        self._given_up = self._thread.is_alive()
        return not self._given_up

    def _follow(self) -> None:
        failures = 0
        with asyncio.Runner() as runner:
            while not self._given_up:
                outcome = self._outcome if self._ending.is_set() else None  # before the files: they are complete then
                try:
                    if self._catch_up(runner):
                        failures = 0
                        continue
                    if outcome is not None:
                        if said := self._logger.end(outcome):
                            self._say(f"{self.name}: {said}")
                        break
                    failures = 0
                except Refused as error:
                    self._say(dropped(self.name, error, failures=1))
                    break
                except Exception as error:  # noqa: BLE001 - a service may raise anything, and the run goes on
                    failures += 1
                    if failures >= (AWAY if isinstance(error, StoreFailed) else FAILURES):
                        self._say(dropped(self.name, error, failures=failures))
                        break
                if outcome is None:
                    self._ending.wait(self._look_s)
                else:
                    time.sleep(self._look_s)  # it failed after the end of the run
            if self._rollouts is not None:
                runner.run(self._rollouts.close())

    def _catch_up(self, runner: asyncio.Runner) -> bool:
        """Give the logger everything that is new. Returns whether there may be more."""
        if not self._begun:
            place = self._logger.begin(self._run)
            self._begun = True
            if place:
                self._say(f"{self.name}: {place}")
        for row in self._rows.new():
            self._logger.log(row)
            self._rows.done(row)
            if self._given_up:
                return True
        if self._rollouts is None:
            return False
        more = runner.run(self._rollouts.look())
        while not self._given_up and (batch := runner.run(self._rollouts.batch())):
            self._logger.rollouts(batch)
            self._rollouts.done(batch)
        return more or self._given_up


def dropped(name: str, error: Exception, *, failures: int) -> str:
    """The line about a logger that fails."""
    first = (str(error).splitlines() or [""])[0]
    times = f"after {failures} failures" if failures > 1 else "after a failure"
    said = f"`{name}` was dropped {times}: {type(error).__name__}: {first}"
    return f"{said}; hint: the run goes on without it; `--resume` continues where the logger stopped"
