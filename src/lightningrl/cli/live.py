"""How it goes, while it goes: a panel that redraws itself in a terminal, one line a step anywhere else."""

import itertools
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightningrl.loop import Exam

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 36


def sparkline(values: Sequence[float], *, width: int = WIDTH) -> str:
    """Rewards in [0, 1] as bars; the mean of neighbours where there are more than fit."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(mean * len(BARS))))] for mean in means)


def clock(seconds: float) -> str:
    """`4:07`"""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """A watcher that shows the run to a person."""

    def __init__(self, console: Console, *, name: str, steps: int, where: str) -> None:
        self._console = console
        self._name, self._steps, self._where = name, steps, where
        self._began = time.monotonic()
        self._step_times: list[float] = []
        self._done = 0
        self._train: list[float] = []
        self._heldout: list[float] = []
        self._metrics: dict[str, float] = {}
        self._doing = ("starting", 0, 0)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._panel, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def collecting(self, what: str, done: int, total: int) -> None:
        self._doing = (what, done, total)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._done = step + 1
        self._train.append(metrics["reward/mean"])
        self._metrics = metrics
        self._step_times.append(metrics["time/collect_s"] + metrics["time/learn_s"])
        if not self._live:
            self._line(
                f"step {step + 1:>3}/{self._steps}  train reward {metrics['reward/mean']:.3f}  {self._tokens_per_s():>6,.0f} tokens/s  "
                f"elapsed {clock(time.monotonic() - self._began)}  left {self._left()}"
            )

    def examined(self, exam: Exam) -> None:
        if exam.mode == "sampled":
            self._heldout.append(exam.mean)
        if not self._live:
            self._line(f"held-out reward {exam.mean:.3f}  ({exam.mode}, {len(exam.rewards)} tasks, after {exam.version} steps)")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _tokens_per_s(self) -> float:
        return self._metrics.get("tokens/sampled", 0.0) / self._step_times[-1] if self._step_times else 0.0

    def _left(self) -> str:
        """From the median of the last ten steps."""
        recent = sorted(self._step_times[-10:])
        return clock(recent[len(recent) // 2] * (self._steps - self._done)) if recent else "…"

    def _panel(self) -> Panel:
        rewards = Table.grid(padding=(0, 2))
        rewards.add_row("train", Text(sparkline(self._train), style="cyan"), _figure(self._train))
        rewards.add_row("held-out", Text(sparkline(self._heldout), style="green"), _figure(self._heldout))
        what, done, total = self._doing
        filled = int(WIDTH * done / total) if total else 0
        facts = [f"{self._tokens_per_s():,.0f} tokens/s"]
        if self._metrics:
            facts.append(f"{self._metrics.get('calls/per_rollout', 0):.1f} calls a rollout")
            facts.append(f"entropy {self._metrics.get('policy/entropy', 0):.2f}")
        rewards.add_row(
            Text("now", style="dim"), Text("━" * filled, style="magenta") + Text("━" * (WIDTH - filled), style="dim"), Text(what, style="dim")
        )
        head = f"step {self._done}/{self._steps} · {clock(time.monotonic() - self._began)} elapsed · {self._left()} left"
        body = Group(Text(head), "", rewards, "", Text(" · ".join(facts), style="dim"))
        return Panel(
            body, title=f"[bold]⚡ {self._name}[/]", subtitle=f"[dim]{self._where}[/]", title_align="left", subtitle_align="right", padding=(1, 2)
        )


def _figure(values: Sequence[float]) -> Text:
    return Text(f"{values[-1]:.2f}" if values else "–", style="bold")
