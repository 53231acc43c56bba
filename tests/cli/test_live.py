import io
import re
import time
from collections.abc import Mapping

import numpy as np
import pytest
from rich.console import Console

from lightningrl.cli.live import Progress, exams_chart, training_chart
from lightningrl.progress import Exam

STEP = {"reward/mean": 0.25, "tokens/sampled": 900.0, "time/collect_s": 2.0, "time/learn_s": 1.0}


def test_the_width_of_the_training_chart_is_the_whole_run() -> None:
    assert training_chart({}, steps=4, width=8) == ""
    assert training_chart({0: 0.0, 1: 0.5}, steps=4, width=8) == "▁▁▅▅"
    assert training_chart({2: 1.0}, steps=4, width=8) == "    ██", "a run that goes on without its first rows"
    long = training_chart({step: step / 999 for step in range(1000)}, steps=1000, width=20)
    assert len(long) == 20 and list(long) == sorted(long)


@pytest.mark.parametrize("width", [3, 7, 58, 171])
@pytest.mark.parametrize("steps", [1, 2, 7, 120, 500])
def test_charts_fit_their_width(steps: int, width: int) -> None:
    for done in range(1, steps + 1):
        assert len(training_chart(dict.fromkeys(range(done), 0.5), steps=steps, width=width)) <= width
        assert len(exams_chart({0: 0.5, done: 0.5}, steps=steps, width=width)) <= width


def test_exams_are_in_the_columns_of_their_steps() -> None:
    assert exams_chart({0: 0.0, 2: 0.5, 4: 1.0}, steps=4, width=9) == "▁···▅···█"


def watched(
    *, terminal: bool, width: int = 100, steps: int | None = 3, proof: Mapping[str, float] | None = None
) -> str:
    out = io.StringIO()
    progress = Progress(
        Console(file=out, force_terminal=terminal, width=width), name="small [1]", steps=steps, where="runs/small"
    )
    with progress:
        progress.starting("loading the model `small`")
        progress.examined(Exam(version=0, mode="sampled", rollouts=(), rewards=np.array([0.0, 1.0])))
        progress.doing("step 1: running the agent", 3, 8)
        if steps:
            progress.stepped(0, STEP | dict(proof or {}))
    return out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_says_whether_the_engine_serves_what_was_trained(terminal: bool) -> None:
    def line(*confirmed: float) -> str:
        return watched(
            terminal=terminal,
            proof={f"p{i}/engine/confirmed": c for i, c in enumerate(confirmed)}
            | {f"p{i}/engine/gap": 0.011 / (i + 1) for i in range(len(confirmed))},
        )

    assert "engine = trainer ✓ 0.011 nats" in line(1.0, 1.0)
    assert "engine ≈ trainer 0.011 nats" in line(1.0, 0.0)
    assert "engine" not in line()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_says_how_many_branches_it_had_and_how_many_were_void(terminal: bool) -> None:
    def line(branches: float, void: float) -> str:
        return watched(terminal=terminal, proof={"forks/branches": branches, "forks/void": void})

    assert "24 branches, 3 void" in line(24.0, 3.0)
    assert "1 branch" in (one := line(1.0, 0.0)) and "branches" not in one and "void" not in one
    assert "branch" not in watched(terminal=terminal)


def frames(shown: str) -> list[str]:
    """All frames in order, without colours."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    return re.findall(r"╭.*?╯[^╭]*", plain, re.DOTALL)


def test_without_a_terminal_there_is_one_plain_line_for_each_event() -> None:
    loading, exam, step = watched(terminal=False).splitlines()
    assert loading == "loading the model `small`"
    assert exam.startswith("held-out reward 0.500") and "after 0 steps" in exam and "\x1b" not in exam + step
    assert "step   1/3" in step and "train reward 0.250" in step and "300 tokens/s" in step and "left 0:06" in step


def test_in_a_terminal_a_panel_shows_the_progress() -> None:
    first, *_, last = frames(watched(terminal=True))
    assert "starting" in first
    assert any("loading the model `small`" in frame for frame in frames(watched(terminal=True)))
    for said in ("small [1]", "step 1/3", "0:06 left", "held-out", "3/8", "step 1: running the agent", "runs/small"):
        assert said in last


@pytest.mark.parametrize("terminal", [False, True])
def test_what_an_activity_waits_for_is_shown_until_it_is_over(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out, now, waits = io.StringIO(), 100.0, ""
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress(Console(file=out, force_terminal=terminal, width=100), name="small", steps=3, where="")
    progress.doing("step 1: serving the new weights")
    for _ in range(2):  # the second update
        progress.waiting("vLLM wakes up")
        now += 65.0
        waits = "".join(_texts(progress))
        progress.waiting("")
    assert "step 1: serving the new weights · vLLM wakes up 1:05" in waits
    assert "vLLM" not in "".join(_texts(progress))
    if not terminal:
        assert out.getvalue() == "vLLM wakes up\n", "told once"


def _texts(progress: Progress) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=100).print(progress._frame())
    return frames(shown.getvalue())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_panel_is_as_wide_as_the_terminal(width: int) -> None:
    lines = frames(watched(terminal=True, width=width))[-1].splitlines()
    assert {len(line) for line in lines if line[:1] in ("│", "╰")} == {width}
    assert max(line.count("━") for line in lines) > width - 45


def test_text_that_a_terminal_echoes_appears_below_the_panel() -> None:
    """A `^C` after the last line of the panel would move the panel up a line, so that it is not erased."""
    for frame in frames(watched(terminal=True)):
        assert re.fullmatch(r"\n[\r\n]*", frame.rpartition("╯")[2]), (
            "the cursor waits at the beginning of an empty line"
        )


def test_an_evaluation_has_no_steps() -> None:
    shown = watched(terminal=True, steps=None)
    assert "step 0" not in shown and "train" not in shown and "sampled 0.500" in shown
    assert "steps" not in watched(terminal=False, steps=None)


def test_a_step_says_what_the_service_has_cost_so_far() -> None:
    out = io.StringIO()
    before = [{"kind": "step", "step": 0, "reward/mean": 0.1, "service/usd": 0.25}]
    progress = Progress(Console(file=out, width=200), name="r", steps=3, where="runs/r", before=before)
    with progress:
        progress.stepped(1, STEP | {"service/usd": 0.5})
    assert "$0.7500" in out.getvalue()
    assert "$" not in watched(terminal=False)
