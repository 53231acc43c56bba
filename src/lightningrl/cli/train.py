"""`lightningrl train recipe.toml`: a run, from a recipe to a trained model."""

import asyncio
import json
import time
from contextlib import nullcontext
from dataclasses import asdict

from rich.console import Console

from lightningrl.cli import health, verdict
from lightningrl.cli.card import write_cards
from lightningrl.cli.console import advise, say
from lightningrl.cli.curve import CurveWatcher, draw_curve
from lightningrl.cli.folder import Journal, RunFolder
from lightningrl.cli.health import HealthWatcher
from lightningrl.cli.hosted_checks import check_learnable
from lightningrl.cli.live import Progress
from lightningrl.cli.page import offered
from lightningrl.cli.ready import check_device, check_memory_of, check_servers, check_tasks
from lightningrl.cli.report import (
    Result,
    at_service,
    before_after,
    cpu_spent,
    next_steps,
    result_of,
    service_spent,
    then_and_now,
)
from lightningrl.cli.stop import Interrupted, run
from lightningrl.config import Config
from lightningrl.errors import Stopped
from lightningrl.loggers import make_loggers, shown_by
from lightningrl.look.checkup import checkup, steps_of
from lightningrl.look.process import RESULT, named
from lightningrl.progress import Exam, Watcher


class Watchers:
    """Several watchers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        for watcher in self._watchers:
            watcher.doing(what, done, total)

    def voided(self, step: int, why: str) -> None:
        for watcher in self._watchers:
            watcher.voided(step, why)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        for watcher in self._watchers:
            watcher.stepped(step, metrics)

    def examined(self, exam: Exam) -> None:
        for watcher in self._watchers:
            watcher.examined(exam)


def train(config: Config, folder: RunFolder, *, console: Console, ui: bool = False) -> Result:
    """Train, show the progress, and write all results to the run's folder. A recipe that cannot run leaves none.

    `ui`: offer the page of the run meanwhile.
    """
    if config.backend == "tinker":
        check_learnable(config)
    check_device(config)
    check_servers(config)
    loggers = make_loggers(config)
    check_tasks(config, ("heldout", "train"), console=console)
    with console.status("loading torch"):
        check_memory_of(config)
    folder.make(config)
    try:
        with (
            named(folder.path),
            shown_by(loggers, config, folder.path, say=lambda line: advise(console, "logger", "cyan", line)),
        ):
            return run(_train(config, folder, console=console, ui=ui))
    except Interrupted as stop:
        said = f"stopped by {stop.signal.name}; finished steps and the rollouts of this step are kept"
        raise Stopped(said, hint=f"continue with: {folder.resume_command}", exit_code=stop.exit_code) from None


async def _train(config: Config, folder: RunFolder, *, console: Console, ui: bool) -> Result:
    async with offered(folder.path, console) if ui else nullcontext():
        return await _trained(config, folder, console=console)


async def _trained(config: Config, folder: RunFolder, *, console: Console) -> Result:
    began = time.monotonic()
    progress = Progress(
        console, name=config.name, steps=config.loop.steps, where=str(folder.path), before=folder.rows()
    )
    steps = config.loop.steps
    with progress, CurveWatcher(folder, title=config.name, steps=steps) as curve:
        progress.starting("loading torch")
        from lightningrl.cli.workforce import follow, invite
        from lightningrl.serve import lightning  # slow to import, so the progress is shown first

        async with lightning(config, folder.path, starting=progress.starting, waiting=progress.waiting) as server:
            version = await server.version()
            journal = Journal(folder, version=version)
            loop = server.loop(Watchers(journal, progress, curve, HealthWatcher(console, config, before=folder.rows())))
            invite(server, console)
            following = asyncio.create_task(follow(server, progress))
            try:
                summary = await loop.run()
            finally:
                following.cancel()
            server.workers.dismiss()
            await server.export(folder.model)
            example = await then_and_now(summary, server.store, decode=server.template.decode, seed=config.seed)
    rows = folder.rows()
    draw_curve(rows, folder.curve, title=config.name, steps=steps)
    loop.cpu.lap("rest")
    seconds = time.monotonic() - began
    found = verdict.judge(summary, steps_of(rows), config)
    result = result_of(
        summary,
        found,
        seconds=seconds,
        cpu_s=loop.cpu.seconds,
        service=at_service(rows, loop.service_metrics()),
        steps=steps,
        run_dir=str(folder.path),
    )
    health.show(checkup(rows, config), console)
    console.print(before_after(summary))
    if example:
        console.print(example)
    verdict.show(found, summary, console)
    say(console, f"{result.steps} steps, {result.rollouts:,} rollouts, {result.seconds:.0f} s")
    if result.service:
        say(console, service_spent(result))
    if result.cpu_s:
        say(console, cpu_spent(result))
    write_cards(folder.model, config, result)
    next_steps(console, config, run_dir=folder.path)
    draft = folder.path / f"{RESULT}.draft"
    draft.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    draft.replace(folder.path / RESULT)  # whoever reads it meanwhile gets all of it
    return result
