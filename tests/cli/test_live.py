import io

import numpy as np
from rich.console import Console

from lightningrl.cli.live import Progress, sparkline
from lightningrl.loop import Exam


def test_a_sparkline_rises_with_the_reward_and_never_outgrows_its_width() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    long = sparkline([index / 999 for index in range(1000)], width=20)
    assert len(long) == 20 and list(long) == sorted(long)


def watched(*, terminal: bool) -> str:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=terminal, width=100), name="small", steps=3, where="runs/small")
    with progress:
        progress.examined(Exam(version=0, mode="sampled", rollouts=(), rewards=np.array([0.0, 1.0])))
        progress.collecting("step 0", 3, 8)
        progress.stepped(0, {"reward/mean": 0.25, "tokens/sampled": 900.0, "time/collect_s": 2.0, "time/learn_s": 1.0})
    return out.getvalue()


def test_without_a_terminal_there_is_one_plain_line_for_each_event() -> None:
    exam, step = watched(terminal=False).splitlines()
    assert exam.startswith("held-out reward 0.500") and "\x1b" not in exam + step
    assert "step   1/3" in step and "train reward 0.250" in step and "300 tokens/s" in step and "left 0:06" in step


def test_in_a_terminal_a_panel_shows_where_the_run_is() -> None:
    shown = watched(terminal=True)
    assert "small" in shown and "step 1/3" in shown and "0:06 left" in shown and "held-out" in shown
