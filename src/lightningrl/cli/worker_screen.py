"""The screen of `lightningrl worker`: a live panel in a terminal, lines elsewhere, or a JSON object for each event."""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from types import TracebackType

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import say
from lightningrl.cli.live import clock
from lightningrl.leases import Outcome
from lightningrl.remote.wire import Welcome
from lightningrl.runner.remote_worker import WorkerOptions
from lightningrl.types import Attempt, Rollout

RATE_S = 60.0
"""The rate counts the attempts that ended in this many seconds."""
LINE_S = 30.0
"""Seconds between two lines about the work, where there is no panel."""
ERRORS, WARNINGS = 3, 3
"""Errors and warnings that the panel shows."""
KINDS = 1000
"""Different errors that are counted."""
LONGEST = 200
"""Characters of an error in the panel."""


class WorkerScreen:
    """A watcher of the connection to the server, that shows what the worker does."""

    def __init__(self, options: WorkerOptions, *, console: Console, as_json: bool) -> None:
        self.drain: Callable[[], object] | None = None
        """Makes the worker claim no more; None: it has not begun."""
        self._options = options
        self._console = console
        self._as_json = as_json
        self._began = time.monotonic()
        self._running: dict[str, tuple[Rollout, float]] = {}
        """Attempt → its rollout, and when it began."""
        self._counts: Counter[str] = Counter()
        self._ends: deque[float] = deque()
        self._errors: dict[str, int] = {}
        """First line of a failure → how often it occurred; the latest is last."""
        self._warnings: list[str] = []
        self._welcome: Welcome | None = None
        self._away: tuple[str, float] | None = None
        """Why the server is away, and since when."""
        self._stopping = False
        self._said_at = time.monotonic()
        live = Live(console=console, refresh_per_second=4, get_renderable=self._frame, transient=True)
        self._live = live if console.is_terminal and not as_json else None

    def __enter__(self) -> "WorkerScreen":
        if self._live:
            self._live.start(refresh=True)
        else:
            self._say(f"worker {self._options.id} for {self._options.place.url}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def stop(self) -> None:
        """A signal has arrived: drain the worker."""
        self._stopping = True
        self._say(f"ending: {len(self._running)} attempts still run; a second signal ends them, too")
        self._event("draining", running=len(self._running))
        if self.drain is not None:
            self.drain()

    def connected(self, welcome: Welcome) -> None:
        again = self._welcome is not None
        self._welcome = welcome
        self._warnings.clear()
        self._event("connected", worker=self._options.id, recipe=welcome.recipe, differences=welcome.differences)
        self._say(f"{'connected again' if again else 'connected'}: `{welcome.recipe}`, waiting for work")
        missing = sorted(set(self._options.config.agent.labels) - set(self._options.labels))
        if missing:
            self._warn(f"the recipe asks for the label `{missing[0]}`, and this worker has not got it (`--label`)")
        for line in welcome.differences:
            self._warn(f"this copy of the recipe is not the server's: {line}")

    def away(self, why: str) -> None:
        if self._away is None:
            self._say(f"the server is away: {why}")
            self._event("away", why=why)
        self._away = (why, time.monotonic() if self._away is None else self._away[1])

    def gone(self) -> None:
        """`away` has said it."""

    def back(self, seconds: float) -> None:
        self._away = None
        self._say(f"the server is back after {seconds:.0f} s")
        self._event("back", seconds=round(seconds, 3))

    def began(self, rollout: Rollout, attempt: Attempt) -> None:
        self._running[attempt.id] = (rollout, time.monotonic())
        self._event("began", rollout=rollout.id, attempt=attempt.id)

    def ended(self, attempt_id: str, outcome: Outcome) -> None:
        rollout = self._forget(attempt_id)
        status = "failed" if outcome.status == "timeout" else outcome.status
        self._counts[status] += 1
        self._ends.append(time.monotonic())
        error = (outcome.error or "").partition("\n")[0]
        self._event("ended", rollout=rollout, attempt=attempt_id, status=outcome.status, error=error or None)
        if outcome.status != "succeeded":
            self._fail(error or outcome.status, rollout=rollout)
        self._say_counts()

    def over(self) -> None:
        self._event("over")
        self._say("the run is complete")

    def taken(self, attempt_ids: Collection[str]) -> None:
        for attempt_id in attempt_ids:
            rollout = self._forget(attempt_id)
            self._counts["lost"] += 1
            self._event("taken", rollout=rollout, attempt=attempt_id)
            self._fail("lost: the server has given it to another, as its lease had passed", rollout=rollout)

    def summary(self, *, seconds: float) -> None:
        """What the worker did, at its end."""
        self._event("ended_worker", **self._tally(), seconds=round(seconds, 1))
        say(self._console, f"{self._said_counts()}, {clock(seconds)}")

    def _forget(self, attempt_id: str) -> str:
        """The attempt ends. Returns the id of its rollout."""
        found = self._running.pop(attempt_id, None)
        return attempt_id if found is None else found[0].id

    def _fail(self, text: str, *, rollout: str) -> None:
        """Note a failure. Where there is no panel, a line tells of the first one of its kind."""
        before = self._errors.pop(text, 0)
        self._errors[text] = before + 1
        if len(self._errors) > KINDS:
            del self._errors[next(iter(self._errors))]
        if not before:
            self._say(f"{rollout}: {text}")

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        if not self._live:
            say(self._console, ("warning: ", "bold yellow"), text)

    def _say(self, text: str) -> None:
        if not self._live:
            say(self._console, f"{time.strftime('%H:%M:%S')}  {text}")

    def _say_counts(self) -> None:
        if time.monotonic() - self._said_at > LINE_S:
            self._said_at = time.monotonic()
            self._say(f"{self._said_running()}, {self._per_minute()} per minute, {self._said_counts()}")

    def _event(self, event: str, **facts: object) -> None:
        if self._as_json:
            typer.echo(json.dumps({"event": event, "time": round(time.time(), 3), **facts}))

    def _tally(self) -> dict[str, int]:
        return {status: self._counts[status] for status in ("succeeded", "failed", "lost")}

    def _said_counts(self) -> str:
        return ", ".join(f"{count:,} {status}" for status, count in self._tally().items())

    def _said_running(self) -> str:
        return f"running {len(self._running)}/{self._options.concurrency}"

    def _per_minute(self) -> int:
        while self._ends and self._ends[0] < time.monotonic() - RATE_S:
            self._ends.popleft()
        return len(self._ends)

    def _frame(self) -> Group:
        """The panel and an empty line, on which the terminal echoes Ctrl-C without breaking the panel."""
        return Group(self._panel(), "")

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("server", self._server())
        table.add_row("running", self._bar())
        table.add_row("ended", self._ended())
        if self._options.labels:
            table.add_row("labels", Text(", ".join(self._options.labels)))
        if self._running:
            oldest = min(began for _, began in self._running.values())
            names = ", ".join(sorted(rollout.id for rollout, _ in self._running.values()))
            table.add_row("longest", Text(clock(time.monotonic() - oldest)))
            table.add_row("now", Text(names, overflow="ellipsis", no_wrap=True))
        for text in self._warnings[-WARNINGS:]:
            table.add_row("warning", Text(text, style="yellow"))
        for text, count in list(self._errors.items())[: -ERRORS - 1 : -1]:
            line = f"{count} × {text}"
            table.add_row("error", Text(line if len(line) <= LONGEST else f"{line[:LONGEST]}…", style="red"))
        recipe = self._welcome.recipe if self._welcome else self._options.config.name
        hint = "ending; Ctrl-C again ends at once" if self._stopping else "Ctrl-C ends it after its attempts"
        return Panel(
            table,
            title=Text(
                f"⚡ {recipe}: worker {self._options.id} · {clock(time.monotonic() - self._began)}", style="bold"
            ),
            subtitle=Text(hint, style="dim"),
            title_align="left",
            subtitle_align="right",
            padding=(1, 2),
        )

    def _server(self) -> Text:
        url = self._options.place.url
        if self._away is not None:
            why, at = self._away
            state = (f"away for {time.monotonic() - at:.0f} s: {why}", "bold yellow")
        elif self._welcome is None:
            state = ("connecting", "yellow")
        else:
            state = ("connected", "green")
        return Text.assemble(url, "  ", state)

    def _bar(self) -> Text:
        most, count = self._options.concurrency, len(self._running)
        width = min(40, max(10, self._console.width - 50))
        filled = min(width, -(-width * count // most))
        waiting = "" if count or self._welcome is None else "  waiting for work"
        parts = (("━" * filled, "magenta"), ("━" * (width - filled), "dim"), f"  {count}/{most}", (waiting, "dim"))
        return Text.assemble(*parts)

    def _ended(self) -> Text:
        counts = self._tally()
        styles = {"succeeded": "green", "failed": "red", "lost": "yellow"}
        parts = [(f"{count:,} {status}", styles[status] if count else "dim") for status, count in counts.items()]
        text = Text("  ").join(Text(*part) for part in parts)
        return text + Text(f"  {self._per_minute()} per minute", style="dim")
