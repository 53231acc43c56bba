"""Progress of a run: a live panel in a terminal, and one line per event elsewhere."""

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import say
from lightningrl.progress import Exam

BARS = "▁▂▃▄▅▆▇█"
BESIDES = 2 * (1 + 2) + len("held-out") + 2 + 2 + len("1000/1000")
"""Columns of the panel outside the chart: borders, padding, label, number and gaps."""
NARROWEST = 10
"""Fewest columns of a chart."""


def clock(seconds: float) -> str:
    """`4:07`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def training_chart(rewards: Mapping[int, float], *, steps: int, width: int) -> str:
    """Bars for step → reward in [0, 1]. The run is `width` columns wide: a step has part of a column, or several.

    `{0: 0.0, 1: 0.5}` of 4 steps in 8 columns: `▁▁▅▅`
    """
    columns = math.ceil((max(rewards, default=-1) + 1) * width / steps)
    found = []
    for column in range(columns):
        first = column * steps // width
        last = max(first, math.ceil((column + 1) * steps / width) - 1)
        values = [rewards[step] for step in range(first, last + 1) if step in rewards]
        found.append(_bar(sum(values) / len(values)) if values else " ")
    return "".join(found)


def exams_chart(rewards: Mapping[int, float], *, steps: int, width: int) -> str:
    """Bars for steps taken → reward in an exam, with the columns of `training_chart` and dots in between.

    `{0: 0.0, 2: 0.5}` of 4 steps in 8 columns: `▁··▅`
    """
    at = {done * (width - 1) // steps: _bar(reward) for done, reward in rewards.items()}
    return "".join(at.get(column, "·") for column in range(max(at, default=-1) + 1))


def _bar(reward: float) -> str:
    return BARS[min(len(BARS) - 1, max(0, int(reward * len(BARS))))]


class Progress:
    """A watcher that shows the progress.

    `steps` is None for an evaluation. `before`: rows of `metrics.jsonl` from before a resume.
    """

    def __init__(
        self, console: Console, *, name: str, steps: int | None, where: str, before: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._console = console
        self._name, self._steps, self._where = name, steps, where
        self._began = time.monotonic()
        self._step_times: list[float] = []
        self._train = {row["step"]: row["reward/mean"] for row in before if row["kind"] == "step"}
        self._heldout = {row["step"]: row["reward/mean"] for row in before if row.get("mode") == "sampled"}
        self._usd = sum(row.get("service/usd", 0.0) for row in before)
        self._latest: dict[str, float] = {}  # exam mode → reward
        self._metrics: dict[str, float] = {}
        self._doing = ("starting", 0, 0)
        self._waits, self._since = "", 0.0
        self._workers, self._urgent = "", False
        self._present = list[str]()
        self._told: set[str] = set()
        live = Live(console=console, refresh_per_second=4, get_renderable=self._frame, transient=True)
        self._live = live if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def starting(self, what: str) -> None:
        """Show a slow activity that precedes the first rollout."""
        self.doing(what)
        if not self._live:
            say(self._console, what)

    def waiting(self, what: str) -> None:
        """Show what the present activity waits for, and for how long; empty: nothing any more. Without a panel, each
        text is told once.
        """
        self._waits, self._since = what, time.monotonic()
        if self._live:
            self._live.refresh()
        elif what and what not in self._told:
            self._told.add(what)
            say(self._console, what)

    def workers(self, headline: str, present: Sequence[str], *, urgent: bool) -> None:
        """Show the workers on other machines. `present`: their ids; without a panel, a line tells of each change."""
        if not self._live:
            changes = [f"worker {name} has connected" for name in present if name not in self._present]
            changes += [f"worker {name} is away" for name in self._present if name not in present]
            if changes or (urgent and headline != self._workers):
                say(self._console, "; ".join([*changes, *([headline] if headline else [])]))
        self._workers, self._urgent, self._present = headline, urgent, list(present)

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        fresh = what != self._doing[0]
        self._doing = (what, done, total)
        if self._live and fresh:
            self._live.refresh()  # the next activity may block this thread

    def voided(self, step: int, why: str) -> None:
        pass

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._train[step] = metrics["reward/mean"]
        self._metrics = metrics
        self._usd += metrics.get("service/usd", 0.0)
        self._step_times.append(metrics["time/collect_s"] + metrics["time/learn_s"])
        if not self._live:
            reward = f"train reward {metrics['reward/mean']:.3f}  {self._tokens_per_s():>6,.0f} tokens/s"
            clocks = f"elapsed {self._elapsed()}  left {self._left()}"
            facts = [
                f"step {step + 1:>3}/{self._steps}",
                reward,
                *_branches(metrics),
                *_proof(metrics),
                *self._cost(),
                clocks,
            ]
            say(self._console, "  ".join(facts))

    def examined(self, exam: Exam) -> None:
        self._latest[exam.mode] = exam.mean
        if exam.mode == "sampled":
            self._heldout[exam.version] = exam.mean
        if not self._live:
            after = "" if self._steps is None else f", after {exam.version} steps"
            say(self._console, f"held-out reward {exam.mean:.3f}  ({exam.mode}, {len(exam.rewards)} tasks{after})")

    def _tokens_per_s(self) -> float:
        return self._metrics.get("tokens/sampled", 0.0) / self._step_times[-1] if self._step_times else 0.0

    def _elapsed(self) -> str:
        return clock(time.monotonic() - self._began)

    def _left(self) -> str:
        """Estimate from the median of the last ten steps, without exams."""
        recent = sorted(self._step_times[-10:])
        return clock(recent[len(recent) // 2] * ((self._steps or 0) - len(self._train)))

    def _cost(self) -> list[str]:
        """`$0.0312`: what a service has cost so far; nothing if its prices are not known."""
        return [f"${self._usd:,.4f}"] if "service/usd" in self._metrics else []

    def _frame(self) -> Group:
        """The panel and an empty line, on which the terminal echoes Ctrl-C without breaking the panel."""
        return Group(self._panel(), "")

    def _panel(self) -> Panel:
        what, done, total = self._doing
        width = max(NARROWEST, self._console.width - BESIDES)
        filled = width * done // total if total else 0
        charts = Table.grid(padding=(0, 2))
        charts.add_column(width=len("held-out"))
        charts.add_column(width=width)
        charts.add_column(width=len("1000/1000"))
        if self._steps:
            train = training_chart(self._train, steps=self._steps, width=width)
            heldout = exams_chart(self._heldout, steps=self._steps, width=width)
            charts.add_row("train", Text(train, style="cyan"), _latest(self._train))
            charts.add_row("held-out", Text(heldout, style="green"), _latest(self._heldout))
        bars = Text.assemble(("━" * filled, "magenta"), ("━" * (width - filled), "dim"))
        charts.add_row("now", bars, f"{done}/{total}" if total else "")
        waits = f" · {self._waits} {clock(time.monotonic() - self._since)}" if self._waits else ""
        charts.add_row("", Text(what + waits))
        if self._workers:
            charts.add_row("workers", Text(self._workers, style="yellow" if self._urgent else ""))
        body = Group(Text(self._head()), "", charts, "", Text(self._facts(), style="dim"))
        title = Text(f"⚡ {self._name}", style="bold")
        return Panel(
            body,
            title=title,
            subtitle=Text(self._where, style="dim"),
            title_align="left",
            subtitle_align="right",
            padding=(1, 2),
        )

    def _head(self) -> str:
        if self._steps is None:
            return f"{self._elapsed()} elapsed"
        left = f" · {self._left()} left" if self._step_times else ""
        return f"step {len(self._train)}/{self._steps} · {self._elapsed()} elapsed{left}"

    def _facts(self) -> str:
        facts = [f"{mode} {reward:.3f}" for mode, reward in self._latest.items()] if self._steps is None else []
        if self._metrics:
            facts.append(f"{self._tokens_per_s():,.0f} tokens/s")
            facts.append(f"{self._metrics.get('calls/per_rollout', 0):.1f} calls per rollout")
        if "policy/entropy" in self._metrics:  # with several policies, the key has a prefix
            facts.append(f"entropy {self._metrics['policy/entropy']:.2f}")
        facts += [*_branches(self._metrics), *_proof(self._metrics), *self._cost()]
        return " · ".join(facts)


def _branches(metrics: Mapping[str, float]) -> list[str]:
    """`24 branches, 3 void`; nothing in a step without branches."""
    if "forks/branches" not in metrics:
        return []
    branches, void = int(metrics["forks/branches"]), int(metrics["forks/void"])
    return [f"{branches} branch{'' if branches == 1 else 'es'}" + (f", {void} void" if void else "")]


def _proof(metrics: Mapping[str, float]) -> list[str]:
    """`engine = trainer ✓ 0.011 nats` if probes have confirmed that the engine serves the new weights; `engine ≈
    trainer 0.011 nats` if this step has changed too little to tell; nothing if no engine was asked. With several
    policies, the keys have prefixes, and the line shows the worst.
    """
    confirmed = [value for key, value in metrics.items() if key.endswith("engine/confirmed")]
    if not confirmed:
        return []
    gap = max(value for key, value in metrics.items() if key.endswith("engine/gap"))
    return [f"engine = trainer ✓ {gap:.3f} nats" if all(confirmed) else f"engine ≈ trainer {gap:.3f} nats"]


def _latest(rewards: Mapping[int, float]) -> Text:
    return Text(f"{rewards[max(rewards)]:.2f}" if rewards else "–", style="bold")
