"""`lightningrl worker URL --on ray`: many workers on a Ray cluster, and what they do."""

import asyncio
import json
import math
import sys
import time
from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightningrl.cli.console import say
from lightningrl.cli.extras import require
from lightningrl.cli.live import clock
from lightningrl.cli.stop import instead, listening, run
from lightningrl.cli.worker import WorkerFlags, read_key
from lightningrl.errors import UserError
from lightningrl.recipe import load_config

if TYPE_CHECKING:
    from lightningrl.runner.on_ray import Orders, RayWorkers, Report

TICK_S = 2.0
"""Seconds between two questions to the workers."""
LINE_S = 30.0
"""Seconds between two lines about the work, where there is no panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFlags:
    """The options for Ray on the command line."""

    address: str
    count: int
    cpus: float
    shared: bool


def ray_flags(
    on: str | None, *, count: int | None, cpus: float | None, address: str | None, shared: bool
) -> RayFlags | None:
    """None: the worker runs on this machine. Raises `UserError` for options that need `--on ray`."""
    if on is None:
        given = {"--count": count, "--cpus": cpus, "--ray-address": address, "--shared": shared or None}
        for name, value in given.items():
            if value is not None:
                raise UserError(f"`{name}` is for workers on Ray", hint="add `--on ray`, or leave it out")
        return None
    return RayFlags(address=address or "auto", count=count or 1, cpus=1.0 if cpus is None else cpus, shared=shared)


def worker_on_ray(url: str, flags: WorkerFlags, ray: RayFlags, *, console: Console, as_json: bool) -> None:
    """Keep the workers on the cluster until a signal drains them, or until each has run `max_attempts`."""
    require("ray")
    from lightningrl.runner import on_ray

    orders, folder = _orders(url, flags, shared=ray.shared)
    events = sys.stdout if as_json else None
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # Ray prints there what happens to its nodes
        with console.status(f"connecting to Ray at `{ray.address}`"):
            on_ray.connect(ray.address, folder=folder)
        try:
            with listening():  # in place of Ray's own handler of SIGTERM, which ends the process at once
                run(_watch(orders, ray, console=console, events=events))
        finally:
            on_ray.disconnect()


async def _watch(orders: "Orders", ray: RayFlags, *, console: Console, events: TextIO | None) -> None:
    from lightningrl.runner.on_ray import RayWorkers

    workers = RayWorkers(orders, count=ray.count, cpus=ray.cpus)
    screen = RayScreen(workers, url=orders.url, count=ray.count, console=console, events=events)
    ending = asyncio.create_task(workers.ended())
    try:
        with screen, instead(screen.stop):
            while not ending.done():
                await workers.watch(timeout_s=TICK_S)
                screen.update()
                if screen.stopping or workers.over:
                    workers.drain()
                await asyncio.wait({ending}, timeout=TICK_S)
        ending.result()
        screen.summary()
    finally:
        ending.cancel()
        workers.close()


def _orders(url: str, flags: WorkerFlags, *, shared: bool) -> tuple["Orders", Path | None]:
    """What the workers are told, and the folder to copy to their nodes; None: it is there already."""
    from lightningrl.runner.on_ray import Orders

    path = flags.recipe / "recipe.toml" if flags.recipe.is_dir() else flags.recipe
    config = load_config(path, flags.overrides)
    folder = path.resolve().parent
    if not shared and config.root != folder:
        hint = "give `--shared`, if all nodes see these folders, or move the recipe to its code"
        raise UserError(f"the recipe's `root` is `{config.root}`, which is not copied with `{folder}`", hint=hint)
    orders = Orders(
        url=url,
        key=read_key(flags.key_file),
        recipe=str(path.resolve()) if shared else path.name,
        overrides=tuple(flags.overrides),
        name=flags.name or "",
        labels=tuple(flags.labels),
        concurrency=flags.concurrency,
        processes=flags.processes,
        max_attempts=math.inf if flags.max_attempts is None else flags.max_attempts,
        certificates=None if flags.ca_file is None else _certificates(flags.ca_file),
        accept_differences=flags.accept_differences,
    )
    return orders, None if shared else folder


def _certificates(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        hint = "give a file of certificates in PEM format"
        raise UserError(f"cannot read the certificates in `{path}`: {error}", hint=hint) from error


class RayScreen:
    """How many workers run where: a live panel in a terminal, or lines elsewhere; and JSON objects, to `events`."""

    def __init__(self, workers: "RayWorkers", *, url: str, count: int, console: Console, events: TextIO | None) -> None:
        self.stopping = False
        self._workers = workers
        self._url = url
        self._count = count
        self._console = console
        self._events = events
        self._began = time.monotonic()
        self._said = ("", -math.inf)
        """The latest line about the work, and when it was said."""
        live = Live(console=console, refresh_per_second=2, get_renderable=self._frame, transient=True)
        self._live = live if console.is_terminal and events is None else None

    def __enter__(self) -> "RayScreen":
        if self._live:
            self._live.start(refresh=True)
        else:
            self._say(f"{self._count} workers on Ray for {self._url}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def stop(self) -> None:
        """A signal has arrived: drain the workers."""
        self.stopping = True
        running = sum(report.running for report in self._workers.current)
        self._say(f"ending: {running} attempts still run; a second signal ends them, too")
        self._event("draining", running=running)

    def update(self) -> None:
        """Say what has changed, where there is no panel."""
        places = self._places()
        self._event(
            "workers", nodes={node: len(found) for node, found in places.items()}, waiting=self._workers.waiting
        )
        line, now = self._said_places(), time.monotonic()
        if line != self._said[0] or now - self._said[1] > LINE_S:
            self._said = (line, now)
            self._say(f"{line}; {self._said_counts()}")

    def summary(self) -> None:
        """What all workers did, those included that have died."""
        tally = self._tally()
        self._event("ended_workers", **tally, seconds=round(time.monotonic() - self._began, 1))
        say(self._console, f"{self._said_counts()}, {clock(time.monotonic() - self._began)}")

    def _places(self) -> dict[str, list["Report"]]:
        places: defaultdict[str, list[Report]] = defaultdict(list)
        for report in self._workers.current:
            places[report.node].append(report)
        return dict(sorted(places.items()))

    def _said_places(self) -> str:
        places = [f"{len(found)} on {node}" for node, found in self._places().items()]
        waiting = [f"{self._workers.waiting} waiting for a node"] if self._workers.waiting else []
        return ", ".join([*places, *waiting])

    def _tally(self) -> dict[str, int]:
        reports = self._workers.reports
        return {
            "succeeded": sum(report.succeeded for report in reports),
            "failed": sum(report.failed for report in reports),
            "lost": sum(report.lost for report in reports),
        }

    def _said_counts(self) -> str:
        return ", ".join(f"{count:,} {status}" for status, count in self._tally().items())

    def _say(self, text: str) -> None:
        if not self._live:
            say(self._console, f"{time.strftime('%H:%M:%S')}  {text}")

    def _event(self, event: str, **facts: object) -> None:
        if self._events is not None:
            typer.echo(json.dumps({"event": event, "time": round(time.time(), 3), **facts}), file=self._events)

    def _frame(self) -> Group:
        """The panel and an empty line, on which the terminal echoes Ctrl-C without breaking the panel."""
        return Group(self._panel(), "")

    def _panel(self) -> Panel:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        table.add_column("node")
        for title in ("workers", "connected", "running", "succeeded", "failed", "lost"):
            table.add_column(title, justify="right")
        for node, found in self._places().items():
            counts = [
                len(found),
                sum(report.connected for report in found),
                sum(report.running for report in found),
                sum(report.succeeded for report in found),
                sum(report.failed for report in found),
                sum(report.lost for report in found),
            ]
            table.add_row(node, *(f"{count:,}" for count in counts))
        lines: list[Table | Text] = [table]
        if self._workers.waiting:
            lines.append(Text(f"  {self._workers.waiting} start, or wait for a node with room", style="yellow"))
        errors = sorted({report.error for report in self._workers.current if report.error})
        lines += [Text(f"  {error}", style="red", overflow="ellipsis", no_wrap=True) for error in errors[:4]]
        hint = "ending; Ctrl-C again ends at once" if self.stopping else "Ctrl-C ends them after their attempts"
        return Panel(
            Group(*lines),
            title=Text(f"⚡ {self._count} workers on Ray for {self._url}  {clock(time.monotonic() - self._began)}"),
            subtitle=Text(hint, style="dim"),
            title_align="left",
            subtitle_align="right",
            padding=(1, 2),
        )
