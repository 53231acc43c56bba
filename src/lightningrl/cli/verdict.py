"""Did it learn? And if not, what is the likeliest reason? Held-out exams and the metrics of all steps in, words out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.config import Config
from lightningrl.data.intervals import Difference, paired_difference
from lightningrl.health import SILENT_GROUPS, SOLVED, TREND_Z, Row, mean_of, trend, view, warnings_of
from lightningrl.progress import Mode, Summary

Answer: TypeAlias = Literal["yes", "no", "worse"]

FEW_STEPS = 30
"""The recipes of this repository take 10 to 120 steps; most have not moved beyond the noise of an exam before the
fifth.
"""
STILL = 1e-5
"""Nats a token between the weights at the beginning of a step and within it. A step of the text-to-SQL recipe is 1e-2
to 1e-4 apart.
"""
FEW_TASKS = 100
"""Held-out tasks: the interval of a share of 0.5 is then ± 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the held-out exams say of a run."""

    learnt: Answer
    """`yes`: the interval of `change` lies above 0. `worse`: it lies below."""
    change: Difference
    """Held-out reward after training less before, sampled, task by task."""
    reason: str
    """Why it has not learnt, most likely, with a hint behind `; hint: `. Empty if it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a reason is looked for in."""

    config: Config
    rows: Sequence[Row]
    """Steps, as the first policy sees them."""
    before: float
    """Held-out reward before training."""
    changes: Mapping[Mode, Difference]
    """Held-out reward after training less before, task by task."""
    warnings: Sequence[str]
    """Of `lightningrl health`, after the last step."""


def judge(summary: Summary, rows: Sequence[Row], config: Config) -> Verdict:
    """`rows`: the metrics of every step."""
    changes: dict[Mode, Difference] = {
        mode: paired_difference(exam.rewards, summary.before[mode].rewards) for mode, exam in summary.after.items()
    }
    change, before = changes["sampled"], summary.before["sampled"]
    learnt: Answer = "yes" if change.low > 0 else "worse" if change.high < 0 else "no"
    learners = config.learners()
    own = [view(row, next(iter(learners))) for row in rows]
    evidence = Evidence(
        config=config, rows=own, before=before.mean, changes=changes, warnings=warnings_of(rows, learners)
    )
    return Verdict(learnt=learnt, change=change, reason="" if learnt == "yes" else likeliest(evidence))


def likeliest(evidence: Evidence) -> str:
    """The first reason that fits; what makes learning impossible comes before what makes it slow."""
    return next(filter(None, (reason(evidence) for reason in REASONS)))


def show(verdict: Verdict, summary: Summary, console: Console) -> None:
    """Two or three lines for a person."""
    before, after = summary.before["sampled"], summary.after["sampled"]
    said, style = {
        "yes": ("learnt", "bold green"),
        "no": ("did not learn", "bold yellow"),
        "worse": ("got worse", "bold red"),
    }[verdict.learnt]
    change = verdict.change
    chance = "; chance alone may do as much" if verdict.learnt == "no" and change.mean else ""
    say(
        console,
        (f"\n{said}: ", style),
        f"held-out reward was {before.mean:.3f} before training and is {after.mean:.3f} now, "
        f"a change of {change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}] task by task{chance}",
    )
    if verdict.reason:
        text, _, hint = verdict.reason.partition("; hint: ")
        say(console, ("likeliest reason: ", "bold"), text)
        if hint:
            say(console, ("  hint: ", "yellow"), hint)


# what makes learning impossible


def _no_steps(evidence: Evidence) -> str | None:
    return None if evidence.rows else "no step was taken; hint: raise `loop.steps`"


def _nothing_updated(evidence: Evidence) -> str | None:
    if not all(row.get("optim/skipped", 0.0) == 1.0 for row in evidence.rows):
        return None
    return "no update was made, as every loss or gradient was not finite; hint: the batches are in `skipped/`: look for an infinite reward"


def _rate_of_nothing(evidence: Evidence) -> str | None:
    rates = [learner.trainer.learning_rate for learner in evidence.config.learners().values()]
    return "the learning rate is 0; hint: set `trainer.learning_rate`" if not any(rates) else None


def _one_reward_for_all(evidence: Evidence) -> str | None:
    earned = {row["reward/mean"] for row in evidence.rows}
    if len(earned) > 1 or any(row.get("reward/std_in_group", 0.0) > 0 for row in evidence.rows):
        return None
    (reward,) = earned
    return (
        f"every rollout earned `{reward:.3g}`, so that there was nothing to compare; hint: read what the agent answers "
        "(`lightningrl rollouts RUN_DIR`), check its `reward`, and start from a model that succeeds now and then"
    )


def _nearly_solved(evidence: Evidence) -> str | None:
    if not SOLVED <= evidence.before <= 1:
        return None
    return f"the tasks were nearly solved before training (`{evidence.before:.3g}`); hint: take harder tasks"


def _silent(evidence: Evidence) -> str | None:
    groups = sum(row.get("groups/count", 0.0) for row in evidence.rows)
    silent = sum(row.get("groups/silent", 0.0) for row in evidence.rows)
    if not groups or silent / groups <= SILENT_GROUPS:
        return None
    reward = mean_of(evidence.rows, "reward/mean")
    why = "too hard for this model" if reward < 0.5 else "too easy for it"
    return (
        f"in `{silent / groups:.0%}` of the groups all rollouts earned the same and taught nothing: with `{reward:.3g}` on average the tasks "
        f"may be {why}; hint: take others, a finer reward, a larger `loop.group_size`, or `algorithm.dynamic_sampling`"
    )


def _unhealthy(evidence: Evidence) -> str | None:
    return next(iter(evidence.warnings), None)


# what makes it slow, or hides it


def _not_carried_over(evidence: Evidence) -> str | None:
    rewards = np.array([row["reward/mean"] for row in evidence.rows])
    if trend(rewards) <= TREND_Z:
        return None
    third = max(1, len(rewards) // 3)
    return (
        f"on training tasks reward rose from `{rewards[:third].mean():.3g}` to `{rewards[-third:].mean():.3g}`, and what was learnt does not "
        "carry over to the held-out ones; hint: take more, and more varied, training tasks, or check that both splits ask for the same"
    )


def _greedy_alone(evidence: Evidence) -> str | None:
    greedy = evidence.changes["greedy"]
    if not greedy.low > 0:
        return None
    return (
        f"it has begun to learn: greedy answers earn more by {greedy.mean:+.3f} [{greedy.low:+.3f}, {greedy.high:+.3f}], and what is "
        "sampled follows later; hint: raise `loop.steps`"
    )


def _hardly_moved(evidence: Evidence) -> str | None:
    kl = mean_of(evidence.rows, "policy/kl_engine")
    minibatches = min(learner.trainer.minibatches for learner in evidence.config.learners().values())
    if minibatches < 2 or not kl < STILL:  # with one minibatch it is 0 whatever happens
        return None
    return f"the weights hardly moved (`{kl:.1g}` nats a token within a step); hint: raise `trainer.learning_rate`"


def _few_steps(evidence: Evidence) -> str | None:
    steps = len(evidence.rows)
    if steps >= FEW_STEPS:
        return None
    return f"{steps} step{'s are' if steps > 1 else ' is'} few; hint: raise `loop.steps`, or `trainer.learning_rate` if reward hardly moves"


def _few_tasks(evidence: Evidence) -> str | None:
    change = evidence.changes["sampled"]
    tasks = change.tasks
    if tasks >= FEW_TASKS or not change.mean > 0:
        return None
    return f"{tasks} held-out tasks cannot tell so small a change from chance; hint: raise `tasks.heldout`"


def _unknown(evidence: Evidence) -> str | None:
    return "none stands out; hint: try another `trainer.learning_rate`, and read some rollouts (`lightningrl rollouts RUN_DIR`)"


Reason: TypeAlias = Callable[[Evidence], str | None]
REASONS: tuple[Reason, ...] = (
    _no_steps,
    _nothing_updated,
    _rate_of_nothing,
    _one_reward_for_all,
    _nearly_solved,
    _silent,
    _unhealthy,
    _greedy_alone,
    _not_carried_over,
    _hardly_moved,
    _few_steps,
    _few_tasks,
    _unknown,
)
