"""The verdict of a run: how much it has learnt, or the likeliest reason why it has not."""

import io

import numpy as np
import pytest
from rich.console import Console

from lightningrl.cli.verdict import Verdict, judge, show
from lightningrl.config import Config
from lightningrl.health import Row
from lightningrl.progress import Exam, Mode, Summary
from tests.test_health import HEALTHY

TASKS = 60
LEVEL = HEALTHY | {"reward/std_in_group": 0.4}
ALL_ALIKE = LEVEL | {"reward/mean": 0.0, "reward/std_in_group": 0.0, "groups/silent": 24.0}


def exam(share: float, *, mode: Mode, version: int) -> Exam:
    """An exam in which a `share` of the tasks succeeds."""
    return Exam(version=version, mode=mode, rollouts=(), rewards=(np.arange(TASKS) < share * TASKS).astype(float))


def summary(before: float, after: float, *, greedy: float, steps: int = 40) -> Summary:
    return Summary(
        before={"sampled": exam(before, mode="sampled", version=0), "greedy": exam(before, mode="greedy", version=0)},
        after={
            "sampled": exam(after, mode="sampled", version=steps),
            "greedy": exam(greedy, mode="greedy", version=steps),
        },
        rollouts=0,
    )


def config() -> Config:
    tree = {
        "name": "small",
        "agent": {"entry": "a:b", "reward": "a:c"},
        "tasks": {"source": "a:d"},
        "model": {"path": "model"},
    }
    return Config.model_validate(tree)


def verdict(rows: list[Row], *, before: float = 0.3, after: float = 0.3, greedy: float | None = None) -> Verdict:
    return judge(summary(before, after, greedy=before if greedy is None else greedy, steps=len(rows)), rows, config())


def rising(steps: int) -> list[Row]:
    return [LEVEL | {"reward/mean": 0.3 + 0.01 * step} for step in range(steps)]


def test_a_run_that_has_learnt_has_no_reason() -> None:
    found = verdict([LEVEL] * 40, after=0.8)
    assert (found.learnt, found.reason) == ("yes", "")
    assert found.change.mean == pytest.approx(0.5) and 0 < found.change.low < 0.5 < found.change.high


def test_a_change_within_noise_does_not_count_as_learnt() -> None:
    assert verdict([LEVEL] * 40, after=0.3 + 1 / TASKS).learnt == "no"
    assert verdict([LEVEL] * 40, before=0.8, after=0.3).learnt == "worse"


@pytest.mark.parametrize(
    ("rows", "before", "reason", "hint"),
    [
        ([], 0.3, "no step was taken", "loop.steps"),
        ([LEVEL | {"optim/skipped": 1.0}] * 3, 0.3, "every update was skipped", "`skipped/`"),
        ([ALL_ALIKE] * 3, 0.0, "every rollout earned `0`", "succeeds now and then"),
        ([LEVEL] * 40, 0.95, "nearly solved before training", "harder tasks"),
        ([LEVEL | {"groups/silent": 20.0, "reward/mean": 0.05}] * 3, 0.05, "in `83%` of the groups", "loop.group_size"),
        ([LEVEL] * 9 + [LEVEL | {"policy/entropy": 0.01}] * 9, 0.3, "entropy has fallen", "loss.entropy_coef"),
        ([LEVEL | {"policy/logprob_gap": 0.5}] * 3, 0.3, "engine and trainer disagree", "docs/engines.md"),
        (rising(40), 0.3, "does not carry over", "varied"),
        ([LEVEL | {"policy/kl_engine": 1e-8}] * 40, 0.3, "hardly moved", "trainer.learning_rate"),
        ([LEVEL] * 4, 0.3, "4 steps are few", "loop.steps"),
        ([LEVEL] * 40, 0.3, "none stands out", "trainer.learning_rate"),
    ],
)
def test_a_run_that_has_not_learnt_has_a_reason(rows: list[Row], before: float, reason: str, hint: str) -> None:
    found = verdict(rows, before=before, after=before)
    assert found.learnt == "no"
    text, _, advice = found.reason.partition("; hint: ")
    assert reason in text and hint in advice


def test_a_small_change_on_few_tasks_is_reported_as_such() -> None:
    found = verdict([LEVEL] * 40, after=0.3 + 1 / TASKS)
    assert "60 held-out tasks cannot tell" in found.reason and "tasks.heldout" in found.reason


def test_a_gain_of_greedy_answers_alone_is_reported() -> None:
    found = verdict([LEVEL] * 4, greedy=0.7)
    assert found.learnt == "no" and "it has begun to learn" in found.reason


def shown(found: Verdict, before: float, after: float) -> str:
    out = io.StringIO()
    show(found, summary(before, after, greedy=after), Console(file=out))
    return out.getvalue()


def test_the_verdict_is_in_words() -> None:
    said = shown(verdict([LEVEL] * 4), 0.3, 0.3)
    assert "did not learn: held-out reward was 0.300 before training and is 0.300 now, a change of +0.000 [" in said
    assert "likeliest reason: 4 steps are few\n  hint: raise `loop.steps`" in said
    assert shown(verdict([LEVEL] * 40, after=0.8), 0.3, 0.8).startswith("\nlearnt: ")
