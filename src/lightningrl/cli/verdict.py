"""Whether a run has learnt, and if not, the likeliest reason: held-out exams and step metrics → words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from rich.console import Console

from lightningrl.cli.console import advise, say
from lightningrl.config import Config
from lightningrl.data.intervals import Difference, paired_difference
from lightningrl.health import SILENT_GROUPS, SOLVED, TREND_Z, Row, mean_of, trend, view, warnings_of
from lightningrl.progress import Mode, Summary

Answer: TypeAlias = Literal["yes", "no", "worse"]

FEW_STEPS = 30
"""The recipes of this repository take 10 to 120 steps; most need five to move beyond the noise of an exam."""
STILL = 1e-5
"""KL within a step, in nats a token; below it, the weights hardly move. The text-to-SQL recipe has 1e-4 to 1e-2."""
FEW_TASKS = 100
"""Number of held-out tasks: with this many, the interval of a share of 0.5 is ± 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of comparing the held-out exams before and after training."""

    learnt: Answer
    """`yes`: the interval of `change` lies above 0. `worse`: it lies below."""
    change: Difference
    """Held-out reward after training minus before, sampled, paired by task."""
    reason: str
    """Likeliest reason why the run has not learnt, then `; hint: ` and a hint; "" if it has learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The data in which the reasons are searched."""

    config: Config
    rows: Sequence[Row]
    """Metrics of the steps, as the first policy sees them."""
    before: float
    """Held-out reward before training, sampled."""
    changes: Mapping[Mode, Difference]
    """Held-out reward after training minus before, paired by task."""
    warnings: Sequence[str]
    """Health warnings after the last step."""


def judge(summary: Summary, rows: Sequence[Row], config: Config) -> Verdict:
    """Compare the exams of a run; `rows` are the metrics of all steps."""
    changes: dict[Mode, Difference] = {
        mode: paired_difference(exam.rewards, summary.before[mode].rewards) for mode, exam in summary.after.items()
    }
    change, before = changes["sampled"], summary.before["sampled"]
    learnt: Answer = "no"
    if change.low > 0:
        learnt = "yes"
    elif change.high < 0:
        learnt = "worse"
    learners = config.learners()
    own = [view(row, next(iter(learners))) for row in rows]
    evidence = Evidence(
        config=config,
        rows=own,
        before=before.mean,
        changes=changes,
        warnings=[advice.text for advice in warnings_of(rows, learners)],
    )
    return Verdict(learnt=learnt, change=change, reason="" if learnt == "yes" else likeliest(evidence))


def likeliest(evidence: Evidence) -> str:
    """The first reason that applies. Reasons that make learning impossible come before those that make it slow."""
    return next(filter(None, (reason(evidence) for reason in REASONS)))


def show(verdict: Verdict, summary: Summary, console: Console) -> None:
    """Print the verdict, in two or three lines."""
    before, after = summary.before["sampled"], summary.after["sampled"]
    said, style = {
        "yes": ("learnt", "bold green"),
        "no": ("did not learn", "bold yellow"),
        "worse": ("got worse", "bold red"),
    }[verdict.learnt]
    change = verdict.change
    noise = "; this may be noise" if verdict.learnt == "no" and change.mean else ""
    say(
        console,
        (f"\n{said}: ", style),
        f"held-out reward was {before.mean:.3f} before training and is {after.mean:.3f} now, "
        f"a change of {signed(change)} per task{noise}",
    )
    if verdict.reason:
        advise(console, "likeliest reason", "bold", verdict.reason)


def signed(change: Difference) -> str:
    """A change with its interval: `+0.120 [+0.035, +0.205]`."""
    return f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"


# reasons that make learning impossible


def _no_steps(evidence: Evidence) -> str | None:
    return None if evidence.rows else "no step was taken; hint: raise `loop.steps`"


def _nothing_updated(evidence: Evidence) -> str | None:
    if not all(row.get("optim/skipped", 0.0) == 1.0 for row in evidence.rows):
        return None
    return (
        "every update was skipped, because no loss or no gradient was finite; "
        "hint: the batches are in `skipped/`: look for an infinite reward"
    )


def _rate_of_nothing(evidence: Evidence) -> str | None:
    rates = [learner.trainer.learning_rate for learner in evidence.config.learners().values()]
    return "the learning rate is 0; hint: set `trainer.learning_rate`" if not any(rates) else None


def _one_reward_for_all(evidence: Evidence) -> str | None:
    earned = {row["reward/mean"] for row in evidence.rows}
    if len(earned) > 1 or any(row.get("reward/std_in_group", 0.0) > 0 for row in evidence.rows):
        return None
    (reward,) = earned
    return (
        f"every rollout earned `{reward:.3g}`, so there was nothing to compare; hint: read the agent's answers "
        "(`lightningrl rollouts RUN_DIR`), check its `reward`, and start from a model that succeeds now and then"
    )


def _nearly_solved(evidence: Evidence) -> str | None:
    if not SOLVED <= evidence.before <= 1:
        return None
    return f"the tasks were nearly solved before training (`{evidence.before:.3g}`); hint: use harder tasks"


def _silent(evidence: Evidence) -> str | None:
    groups = sum(row.get("groups/count", 0.0) for row in evidence.rows)
    silent = sum(row.get("groups/silent", 0.0) for row in evidence.rows)
    if not groups or silent / groups <= SILENT_GROUPS:
        return None
    reward = mean_of(evidence.rows, "reward/mean")
    why = "too hard for this model" if reward < 0.5 else "too easy for it"
    return (
        f"in `{silent / groups:.0%}` of the groups all rewards were equal and taught nothing: mean reward "
        f"`{reward:.3g}`, the tasks may be {why}; "
        "hint: use other tasks, a finer reward, a larger `loop.group_size`, or `algorithm.dynamic_sampling`"
    )


def _unhealthy(evidence: Evidence) -> str | None:
    return next(iter(evidence.warnings), None)


# reasons that make learning slow, or hide it


def _not_carried_over(evidence: Evidence) -> str | None:
    rewards = np.array([row["reward/mean"] for row in evidence.rows])
    if trend(rewards) <= TREND_Z:
        return None
    third = max(1, len(rewards) // 3)
    return (
        f"reward on training tasks rose from `{rewards[:third].mean():.3g}` to `{rewards[-third:].mean():.3g}`, but "
        "this does not carry over to held-out tasks; hint: use more varied training tasks, or check that both "
        "splits ask for the same"
    )


def _greedy_alone(evidence: Evidence) -> str | None:
    greedy = evidence.changes["greedy"]
    if not greedy.low > 0:
        return None
    return (
        f"it has begun to learn: greedy answers gained {signed(greedy)}, and sampled ones follow later; "
        "hint: raise `loop.steps`"
    )


def _hardly_moved(evidence: Evidence) -> str | None:
    kl = mean_of(evidence.rows, "policy/kl_engine")
    minibatches = min(learner.trainer.minibatches for learner in evidence.config.learners().values())
    if minibatches < 2 or not kl < STILL:  # with one minibatch it is always 0
        return None
    return f"the weights hardly moved (`{kl:.1g}` nats a token within a step); hint: raise `trainer.learning_rate`"


def _few_steps(evidence: Evidence) -> str | None:
    steps = len(evidence.rows)
    if steps >= FEW_STEPS:
        return None
    few = "1 step is few" if steps == 1 else f"{steps} steps are few"
    return f"{few}; hint: raise `loop.steps`, or `trainer.learning_rate` if reward hardly moves"


def _few_tasks(evidence: Evidence) -> str | None:
    change = evidence.changes["sampled"]
    tasks = change.tasks
    if tasks >= FEW_TASKS or not change.mean > 0:
        return None
    return f"{tasks} held-out tasks cannot tell so small a change from noise; hint: raise `tasks.heldout`"


def _unknown(evidence: Evidence) -> str | None:
    return (
        "none stands out; "
        "hint: try another `trainer.learning_rate`, and read some rollouts (`lightningrl rollouts RUN_DIR`)"
    )


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
