"""`lightningrl worker URL`: runs agents here for a training run on another machine."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lightningrl.cli.folder import RUNS
from lightningrl.cli.stop import instead, run
from lightningrl.cli.worker_screen import WorkerScreen
from lightningrl.errors import UserError
from lightningrl.recipe import load_config
from lightningrl.runner.remote import Place
from lightningrl.runner.remote_worker import WorkerOptions, machine_name, work, worker_id

PROCESSES = 2
"""Processes for agents if the recipe says 0, which is meant for the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFlags:
    """The options of the command line. None: as the recipe says."""

    key_file: Path
    recipe: Path
    overrides: Sequence[str]
    concurrency: int | None
    processes: int | None
    name: str | None
    labels: Sequence[str]
    max_attempts: int | None
    ca_file: Path | None
    accept_differences: bool


def worker(url: str, flags: WorkerFlags, *, console: Console, as_json: bool) -> None:
    """Work until a signal drains the worker, or until it has run `max_attempts`."""
    options = _options(url, flags)
    options.folder.mkdir(parents=True)
    try:
        run(_worker(options, console=console, as_json=as_json))
    finally:
        _tidy(options.folder)


async def _worker(options: WorkerOptions, *, console: Console, as_json: bool) -> None:
    screen = WorkerScreen(options, console=console, as_json=as_json)
    began = time.monotonic()

    def draining(drain: object) -> None:
        assert callable(drain)
        screen.drain = drain

    with screen, instead(screen.stop):
        await work(options, watcher=screen, draining=draining)
    screen.summary(seconds=time.monotonic() - began)


def _options(url: str, flags: WorkerFlags) -> WorkerOptions:
    config = load_config(flags.recipe, flags.overrides)
    name = flags.name or machine_name()
    unique = worker_id(name)
    return WorkerOptions(
        config=config,
        place=Place(url=url, key=read_key(flags.key_file), ca_file=flags.ca_file),
        id=unique,
        name=name,
        labels=flags.labels,
        processes=flags.processes or config.agent.workers or PROCESSES,
        concurrency=flags.concurrency or config.agent.concurrency,
        max_attempts=float("inf") if flags.max_attempts is None else flags.max_attempts,
        accept_differences=flags.accept_differences,
        folder=RUNS / f"worker-{unique}",
    )


def read_key(path: Path) -> str:
    hint = "copy `worker.key` from the run's folder on the server, and keep it secret"
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the key in `{path}`: {error}", hint=hint) from error
    if not key or any(character.isspace() for character in key):
        raise UserError(f"`{path}` holds no worker key", hint=hint)
    return key


def _tidy(folder: Path) -> None:
    """Remove the worker's folder if its agents have printed nothing."""
    log = folder / "agents.log"
    if log.exists() and log.stat().st_size:
        return
    for path in (log, folder / "codex" / "config.toml"):
        path.unlink(missing_ok=True)
    for path in (folder / "codex", folder, RUNS):
        with suppress(OSError):  # it holds something else
            path.rmdir()
