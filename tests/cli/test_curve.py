"""`curve.png` is drawn during a run, and is never half written."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightningrl.cli.curve import SHARE, CurveWatcher
from lightningrl.cli.folder import Journal, RunFolder
from lightningrl.cpu import DRAWING
from lightningrl.progress import Exam

PNG = b"\x89PNG\r\n"
METRICS = {"reward/mean": 0.4}


def exam(version: int) -> Exam:
    return Exam(version=version, mode="sampled", rollouts=(), rewards=np.array([0.0, 1.0]))


def drawn(folder: RunFolder, *, after: int = 0, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Wait for a drawing after the time `after`, and return its time."""
    end = time.monotonic() + 30
    while not folder.curve.exists() or folder.curve.stat().st_mtime_ns <= after:
        assert time.monotonic() < end, "no curve"
        meanwhile()
        time.sleep(0.01)
    assert folder.curve.read_bytes().startswith(PNG)
    return folder.curve.stat().st_mtime_ns


def test_the_curve_is_drawn_as_soon_as_there_is_a_point_and_seldom_after_that(tmp_path: Path) -> None:
    folder, now = RunFolder(tmp_path), [0.0]

    def clock() -> float:
        now[0] += 0.01  # a drawing takes a hundredth of a second
        return now[0]

    journal = Journal(folder, version=0)
    with CurveWatcher(folder, title="small", steps=10, clock=clock) as curve:
        journal.examined(exam(0))
        curve.examined(exam(0))
        first = drawn(folder)
        assert any(thread.name.startswith(DRAWING) for thread in threading.enumerate())
        for step in range(10):
            journal.stepped(step, METRICS)
            curve.stepped(step, METRICS)
    assert folder.curve.stat().st_mtime_ns == first, "ten steps of no time at all"

    def a_step_that_takes_long() -> None:
        now[0] += 0.02 / SHARE
        curve.stepped(10, METRICS)

    with CurveWatcher(folder, title="small", steps=10, clock=clock) as curve:
        curve.stepped(10, METRICS)
        second = drawn(folder, after=first)
        drawn(folder, after=second, meanwhile=a_step_that_takes_long)
