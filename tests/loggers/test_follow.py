"""A logger receives everything once, also across restarts; one that fails or hangs cannot disturb the run."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightningrl.errors import StoreFailed, UserError
from lightningrl.loggers import Ended, Notes, Outcome, Row, Run, make_loggers, shown_by
from lightningrl.loggers.base import Refused
from lightningrl.loggers.follow import FAILURES
from lightningrl.loggers.reading import Rows
from tests.loggers.recorded import config, exam, recorded, step

SETTINGS = config()


class Remembers:
    """Keeps what it is given; fails when a test says so."""

    reads_rollouts = True

    def __init__(self, *, fail: int = 0, error: type[Exception] = OSError, slow_s: float = 0.0) -> None:
        self.heard: list[str] = []
        self.runs: list[Run] = []
        self.threads: set[int] = set()
        self._fail, self._error, self._slow_s = fail, error, slow_s

    def begin(self, run: Run) -> str:
        self.runs.append(run)
        self._hear("begin")
        return "somewhere"

    def log(self, row: Row) -> None:
        self._hear(f"{','.join(row.metrics)} at {row.step}")

    def rollouts(self, batch: Sequence[Ended]) -> None:
        self._hear(" ".join(ended.rollout.id for ended in batch))

    def end(self, outcome: Outcome) -> str:
        self._hear(outcome.ending)
        return "all there"

    def _hear(self, what: str) -> None:
        self.threads.add(threading.get_ident())
        time.sleep(self._slow_s)
        if self._fail:
            self._fail -= 1
            raise self._error("the service is down")
        self.heard.append(what)


class Hangs(Remembers):
    def log(self, row: Row) -> None:
        threading.Event().wait(60)


def follow(folder: Path, logger: Remembers, *, close_s: float = 10.0) -> list[str]:
    """Log what is in the folder. Returns the lines for the user."""
    said: list[str] = []
    (folder / "result.json").write_text("{}")
    with shown_by({"it": logger}, SETTINGS, folder, say=said.append, close_s=close_s):
        pass
    return said


async def test_a_logger_gets_rows_rollouts_and_the_end_in_a_thread_of_its_own(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    run.write(exam(0), exam(0, "greedy"), {"kind": "began", "step": 0, "at": 1.0}, step(0))
    await run.end("a")
    await run.end("b", status="failed")
    logger = Remembers()
    assert follow(tmp_path, logger) == ["it: somewhere", "it: all there"]
    rows = ["heldout/sampled/reward/mean at 0", "heldout/greedy/reward/mean at 0", "reward/mean at 1"]
    assert logger.heard == ["begin", *rows, "a b", "complete"]
    assert len(logger.threads) == 1 and threading.get_ident() not in logger.threads
    await run.store.close()


async def test_what_happens_during_the_run_is_followed(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    logger = Remembers()
    run.complete()
    with shown_by({"it": logger}, SETTINGS, tmp_path, say=lambda line: None):
        for number in range(3):
            run.write(step(number))
            await run.end(f"r{number}")
            deadline = time.monotonic() + 10
            while f"r{number}" not in logger.heard and time.monotonic() < deadline:
                time.sleep(0.05)
        assert logger.heard[-1] == "r2", "without waiting for the end"
    assert [told for told in logger.heard if "reward" in told] == [f"reward/mean at {n}" for n in (1, 2, 3)]
    await run.store.close()


async def test_a_resumed_run_repeats_nothing_although_its_files_begin_anew(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    run.write(exam(0), step(0), step(1))
    await run.end("a")
    follow(tmp_path, Remembers())
    (tmp_path / "metrics.jsonl").rename(tmp_path / "before")
    run.write(exam(0), step(0), step(1), step(2), exam(3))
    await run.end("b")
    again = Remembers()
    follow(tmp_path, again)
    assert again.heard == ["begin", "reward/mean at 3", "heldout/sampled/reward/mean at 3", "b", "complete"]
    await run.store.close()


def test_rows_are_read_on_when_the_run_writes_its_file_anew_meanwhile(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "metrics.jsonl", Notes(tmp_path, "it"))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(0)) + "\n" + json.dumps(step(1)) + "\n")
    assert taken(rows) == [1, 2]
    (tmp_path / "draft").write_text(json.dumps(step(0)) + "\n" + json.dumps(exam(1) | {"more": "x" * 200}) + "\n{")
    (tmp_path / "draft").replace(tmp_path / "metrics.jsonl")
    assert taken(rows) == [1], "the exam; the step is known, and the last line is not complete"


def taken(rows: Rows) -> list[int]:
    found: list[int] = []
    for row in rows.new():
        found.append(row.step)
        rows.done(row)
    return found


async def test_a_failed_rollout_that_is_repeated_is_given_with_its_new_attempt_alone(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    await run.end("a", status="failed")
    given: list[int] = []

    class Counts(Remembers):
        def rollouts(self, batch: Sequence[Ended]) -> None:
            given.extend(attempt.number for ended in batch for attempt in ended.attempts)

    follow(tmp_path, Counts())
    await run.end("a")
    follow(tmp_path, Counts())
    assert given == [1, 2]
    await run.store.close()


async def test_records_are_given_again_after_a_failure(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    run.write(step(0))
    await run.end("a")
    logger = Remembers(fail=FAILURES - 1)
    follow(tmp_path, logger)
    assert logger.heard == ["begin", "reward/mean at 1", "a", "complete"]
    await run.store.close()


@pytest.mark.parametrize(("fails", "error", "times"), [(99, OSError, "5 failures"), (1, Refused, "a failure")])
def test_a_logger_that_keeps_failing_is_dropped_with_one_line(
    tmp_path: Path, fails: int, error: type[Exception], times: str
) -> None:
    [line] = follow(tmp_path, Remembers(fail=fails, error=error))
    assert line.startswith(f"`it` was dropped after {times}: {error.__name__}: the service is down; hint: ")


def test_failures_of_the_runs_own_database_have_a_limit_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightningrl.loggers.follow.AWAY", 2)
    [line] = follow(tmp_path, Remembers(fail=99, error=StoreFailed))
    assert line.startswith("`it` was dropped after 2 failures: StoreFailed: ")


async def test_a_dropped_logger_continues_at_the_next_start(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    run.write(step(0), step(1))

    class Breaks(Remembers):
        def log(self, row: Row) -> None:
            super().log(row)
            self._fail = 99

    first, second = Breaks(), Remembers()
    follow(tmp_path, first)
    follow(tmp_path, second)
    assert first.heard == ["begin", "reward/mean at 1"]
    assert second.heard == ["begin", "reward/mean at 2", "complete"]
    await run.store.close()


async def test_a_logger_that_hangs_holds_the_run_up_for_a_bounded_time(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    run.write(step(0))
    began = time.monotonic()
    said = follow(tmp_path, Hangs(), close_s=0.5)
    assert time.monotonic() - began < 5
    assert said[-1].startswith("`it` did not finish within 0.5 s; hint: ")
    await run.store.close()


async def test_a_slow_logger_stops_after_the_record_at_hand_and_continues_later(tmp_path: Path) -> None:
    run = await recorded(tmp_path)
    for number in range(40):
        await run.end(f"r{number:02d}")
    slow, fast = Remembers(slow_s=0.3), Remembers()
    assert "did not finish" in follow(tmp_path, slow, close_s=0.75)[-1]
    time.sleep(1)
    follow(tmp_path, fast)
    given = " ".join(told for told in [*slow.heard, *fast.heard] if told.startswith("r")).split()
    assert given == [f"r{number:02d}" for number in range(40)], "each once, in order"
    await run.store.close()


def test_a_slow_logger_stops_after_the_row_at_hand_and_is_not_told_of_the_end(tmp_path: Path) -> None:
    rows = [json.dumps(step(number)) + "\n" for number in range(40)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    slow, fast = Remembers(slow_s=0.05), Remembers()
    assert "did not finish" in follow(tmp_path, slow, close_s=0.2)[-1]
    for thread in threading.enumerate():
        if thread.name == "logger-it":
            thread.join(10)
    assert len(slow.heard) < 40 and "complete" not in slow.heard
    follow(tmp_path, fast)
    given = [told for told in [*slow.heard, *fast.heard] if " at " in told]
    assert given == [f"reward/mean at {number + 1}" for number in range(40)], "each once, in order"


@pytest.mark.parametrize(
    ("error", "ending"), [(UserError("no agent"), "failed"), (KeyboardInterrupt(), "stopped"), (None, "complete")]
)
def test_a_logger_is_told_how_the_run_ended(tmp_path: Path, error: BaseException | None, ending: str) -> None:
    logger = Remembers()
    (tmp_path / "result.json").write_text("{}")
    try:
        with shown_by({"it": logger}, SETTINGS, tmp_path, say=lambda line: None):
            if error is not None:
                raise error
    except type(error) if error is not None else ():  # noqa: B030 - nothing is expected then
        pass
    assert logger.heard == ["begin", ending]


def test_secrets_among_the_settings_are_hidden(tmp_path: Path) -> None:
    logger = Remembers()
    settings = config().model_copy(
        update={"store": config().store.model_copy(update={"url": "postgresql://me:hunter2@host/runs"})}
    )
    with shown_by({"it": logger}, settings, tmp_path, say=lambda line: None):
        (tmp_path / "result.json").write_text("{}")
    shown = logger.runs[0].settings
    assert shown["agent"]["env"] == {"SECRET": "•••"}
    assert shown["store"]["url"] == "postgresql://me:•••@host/runs"
    assert "hunter2" not in str(shown)


def test_an_unknown_logger_and_a_missing_package_are_told_at_the_start() -> None:
    with pytest.raises(UserError) as unknown:
        make_loggers(config("wandd"))
    assert "unknown logger `wandd`" in str(unknown.value) and "wandb" in str(unknown.value)
    with pytest.raises(UserError) as missing:
        make_loggers(config("trackio"))
    assert missing.value.hint == 'pip install "lightningrl[trackio]"'
