"""What every logger must do, as checks for authors of loggers. Each check needs a fresh folder.

    @pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
    def test_logger_keeps_its_promises(check, tmp_path): check(MyLogger, tmp_path)

A check calls the logger as a run does, in a thread of its own. Whether the service shows what it was given is for the
logger's own tests.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from lightningrl.loggers.base import Ended, Logger, Outcome, Row, Run
from lightningrl.loggers.examples import COMPLETE, STOPPED, ended, failed, row, run_in
from lightningrl.loggers.notes import Notes

Make: TypeAlias = Callable[[], Logger]
TIMEOUT_S = 60.0
"""Of one check."""


def check_it_logs_a_run_from_begin_to_end(make: Make, folder: Path) -> None:
    _log(make, run_in(folder), [row(0), row(1), row(2)], [ended("train-00000-000-00")], COMPLETE)


def check_it_continues_a_run_that_was_stopped(make: Make, folder: Path) -> None:
    run = run_in(folder)
    _log(make, run, [row(0), row(1)], [ended("train-00000-000-00")], STOPPED)
    again = replace(run, notes=Notes(folder, "checked"))
    _log(make, again, [row(2)], [ended("train-00001-000-00")], COMPLETE)


def check_it_takes_a_run_that_failed_at_once(make: Make, folder: Path) -> None:
    _log(
        make, run_in(folder), [], [], Outcome(ending="failed", result={}, error="AgentError: \x1b[31mno agent\nat all")
    )


def check_it_takes_rollouts_of_every_kind(make: Make, folder: Path) -> None:
    odd = [ended("exam-00000-greedy-0000"), failed("train-00000-000-01"), replace(ended("r"), calls=(), rewards=())]
    _log(make, run_in(folder), [row(0)], [*odd, replace(failed("train-00000-000-02"), attempts=())], COMPLETE)


def check_it_takes_every_number(make: Make, folder: Path) -> None:
    numbers = {"a/nan": math.nan, "a/infinite": math.inf, "a/whole": 10**12, "a/tiny": 5e-324}
    _log(make, run_in(folder), [replace(row(0), metrics=numbers)], [], COMPLETE)


def _log(make: Make, run: Run, rows: list[Row], batch: list[Ended], outcome: Outcome) -> None:
    def work() -> None:
        logger = make()
        assert isinstance(logger.begin(run), str)
        for one in rows:
            logger.log(one)
        if logger.reads_rollouts:
            logger.rollouts(batch)
        assert isinstance(logger.end(outcome), str)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result(TIMEOUT_S)


CHECKS: tuple[Callable[[Make, Path], None], ...] = (
    check_it_logs_a_run_from_begin_to_end,
    check_it_continues_a_run_that_was_stopped,
    check_it_takes_a_run_that_failed_at_once,
    check_it_takes_rollouts_of_every_kind,
    check_it_takes_every_number,
)
