"""The result of a run: held-out reward before and after, one task before and after, and the next commands."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import say
from lightningrl.cli.verdict import Answer, Verdict, signed
from lightningrl.config import Config
from lightningrl.data.intervals import Difference, bootstrap_mean, paired_difference
from lightningrl.progress import MODES, Exam, Summary
from lightningrl.store import Store
from lightningrl.types import Rollout

Decode: TypeAlias = Callable[[list[int]], str]
"""Token ids → text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run, as `--json` prints it."""

    heldout_before: float
    heldout_after: float
    """Mean reward on held-out tasks, sampled at temperature 1."""
    heldout_greedy_before: float
    heldout_greedy_after: float
    learnt: Answer
    """Whether held-out reward, sampled, changed by more than noise: `yes` if it rose, `worse` if it fell, else `no`."""
    heldout_change: Difference
    """Its change, paired by task."""
    reason: str
    """Likeliest reason why the run has not learnt; "" if it has."""
    heldout_tasks: int
    heldout_failed: int
    """Number of failed rollouts in all four exams; the means leave them out."""
    seconds: float
    """Wall-clock time of this command; it does not include the time before a resume."""
    cpu_s: Mapping[str, float]
    """CPU seconds of this command by part: agents, gateway, engine, training, rest (`lightningrl.cpu`). Empty if the
    system does not report them.
    """
    service: Mapping[str, float]
    """What a service has processed in the whole run, by our count: tokens of kind `prefill`, `sample` and `train`, and
    `usd` if their prices are known. Empty: this machine computed.
    """
    steps: int
    rollouts: int
    run_dir: str


def result_of(
    summary: Summary,
    verdict: Verdict,
    *,
    seconds: float,
    cpu_s: Mapping[str, float],
    service: Mapping[str, float],
    steps: int,
    run_dir: str,
) -> Result:
    return Result(
        heldout_before=summary.before["sampled"].mean,
        heldout_after=summary.after["sampled"].mean,
        heldout_greedy_before=summary.before["greedy"].mean,
        heldout_greedy_after=summary.after["greedy"].mean,
        learnt=verdict.learnt,
        heldout_change=verdict.change,
        reason=verdict.reason,
        heldout_tasks=len(summary.after["sampled"].rollouts),
        heldout_failed=sum(exam.failed for exams in (summary.before, summary.after) for exam in exams.values()),
        seconds=round(seconds, 1),
        cpu_s={part: round(spent, 1) for part, spent in cpu_s.items()},
        service=service,
        steps=steps,
        rollouts=summary.rollouts,
        run_dir=run_dir,
    )


def cpu_spent(result: Result) -> str:
    """`CPU: agents 31 s, engine 12 s, …`, largest first."""
    parts = sorted(result.cpu_s.items(), key=lambda part: -part[1])
    return "CPU: " + ", ".join(f"{part} {spent:.0f} s" for part, spent in parts)


def at_service(rows: Iterable[Mapping[str, Any]], last: Mapping[str, float]) -> dict[str, float]:
    """Sums over the rows of a run's metrics and `last`, what came after them: kind → tokens, and `usd`."""
    names = [name for name in last if name.startswith("service/")]
    parts = [*rows, last]
    sums = {name.removeprefix("service/"): sum(part.get(name, 0.0) for part in parts) for name in names}
    return {name: round(amount, 6) for name, amount in sums.items()}


def service_spent(result: Result) -> str:
    """`at the service: 1,204,000 tokens of prompts, 90,100 sampled, 310,000 trained; $0.5200, by our count`"""
    spent = result.service
    tokens = f"{spent['prefill']:,.0f} tokens of prompts, {spent['sample']:,.0f} sampled, {spent['train']:,.0f} trained"
    price = f"; ${spent['usd']:,.4f}" if "usd" in spent else ""
    return f"at the service: {tokens}{price}, by our count"


def before_after(summary: Summary) -> Table:
    """Held-out reward, with 95 % bootstrap intervals over tasks."""
    table = heldout_table([*summary.before.values(), *summary.after.values()])
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if not column else "right")
    for mode in MODES:
        before, after = summary.before[mode], summary.after[mode]
        change = paired_difference(after.rewards, before.rewards)
        label = {"sampled": "sampled (T = 1)", "greedy": "greedy (T = 0)"}[mode]
        table.add_row(label, interval(before), interval(after), Text(signed(change), style=_style(change)))
    return table


def _style(change: Difference) -> str:
    """A colour for a change that is more than noise."""
    if change.low > 0:
        return "bold green"
    return "bold red" if change.high < 0 else ""


def heldout_table(exams: Iterable[Exam]) -> Table:
    """An empty table; its title has the number of tasks, and its caption that of failed rollouts."""
    exams = list(exams)
    title = f"Reward on {len(exams[0].rollouts)} held-out tasks, with 95 % intervals"
    table = Table(title=title, title_justify="left", title_style="bold", min_width=len(title))
    failed = sum(exam.failed for exam in exams)
    if failed:
        table.caption = f"{failed} of {sum(len(exam.rollouts) for exam in exams)} rollouts failed and are left out"
    return table


def interval(exam: Exam) -> str:
    """The mean with its interval: `0.790 [0.735, 0.845]`."""
    low, high = mean_interval(exam)
    return f"{exam.mean:.3f} [{low:.3f}, {high:.3f}]"


def mean_interval(exam: Exam) -> tuple[float, float]:
    """95 % interval of the mean over tasks, without failed rollouts."""
    return bootstrap_mean(exam.rewards[~np.isnan(exam.rewards)])


async def then_and_now(summary: Summary, store: Store, *, decode: Decode, seed: int) -> Panel | None:
    """One random held-out task, before and after. None if every task has a failed rollout."""
    before, after = summary.before["greedy"], summary.after["greedy"]
    done = np.flatnonzero(~np.isnan(before.rewards) & ~np.isnan(after.rewards))
    if not len(done):
        return None
    index = int(np.random.default_rng(seed).choice(done))
    task = after.rollouts[index].task
    question = task.input.get("question", json.dumps(dict(task.input))[:300])
    parts: list[Text] = [Text(str(question), style="bold")]
    for label, exam in (("before", before), ("after", after)):
        answers = await _answers(store, exam.rollouts[index], decode=decode)
        parts += [Text(""), Text(f"{label}: reward {exam.rewards[index]:.3g}", style="bold")]
        parts += [Text(f"{number}. " + answer.replace("\n", "\n   ")) for number, answer in enumerate(answers, start=1)]
    title = Text(f"one of {len(done)} held-out tasks, chosen at random (greedy)")
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


async def _answers(store: Store, rollout: Rollout, *, decode: Decode) -> list[str]:
    """The text of each completion."""
    calls = await store.calls([rollout.accepted_attempt_id] if rollout.accepted_attempt_id else [])
    return [decode(call.completion_ids.tolist()).strip() for call in calls]


def next_steps(console: Console, config: Config, *, run_dir: Path) -> None:
    """Print the next commands."""
    say(console, ("\nNext", "bold"))
    rows = {
        "see the curve": str(run_dir / "curve.png"),
        "look at every rollout": f"lightningrl ui {run_dir}",
        "serve or share the model": f"see {run_dir / 'model' / 'README.md'} for vLLM, Ollama and the Hugging Face Hub",
        "reproduce the result": f"lightningrl eval {run_dir / 'config.toml'} --checkpoint {run_dir}",
    }
    agent = config.root / f"{(config.agent.entry or '').partition(':')[0]}.py"
    if agent.is_file():
        rows["read the code of the agent"] = near(agent)
    for aim, command in rows.items():
        say(console, f"  {aim}:")
        say(console, f"    {command}")


def near(path: Path) -> str:
    """The path relative to the current folder, if it is inside it."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
