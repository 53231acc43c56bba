"""`lightningrl eval recipe.toml --checkpoint DIR`: held-out reward of any model folder, reproducible to the last digit."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from lightningrl.cli.live import Progress
from lightningrl.cli.report import heldout_table, interval
from lightningrl.config import Config
from lightningrl.loop import MODES, Exam, Mode
from lightningrl.serve import lightning


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The figures of an evaluation, as `--json` prints them."""

    heldout: float
    """Sampled at temperature 1."""
    heldout_greedy: float
    tasks: int
    failed: int
    """Rollouts that failed, over both modes; they are left out of the means."""
    seconds: float
    model: str


def evaluate(config: Config, *, console: Console) -> Score:
    """Run the recipe's held-out tasks on the model at `model.path`."""
    return uvloop.run(_evaluate(config, console=console))


async def _evaluate(config: Config, *, console: Console) -> Score:
    began = time.monotonic()
    progress = Progress(console, name=f"{config.name}: held-out tasks", steps=0, where=config.model.path)
    with tempfile.TemporaryDirectory(prefix="lightningrl-eval-") as scratch, progress:
        async with lightning(config, Path(scratch)) as server:
            loop = server.loop(progress)
            await loop.restore()
            exams: dict[Mode, Exam] = {mode: await loop.examine(0, mode, config.tasks.heldout) for mode in MODES}
    table = heldout_table(exams.values())
    table.add_column("")
    table.add_column(config.model.path, justify="right", overflow="fold")
    for mode, exam in exams.items():
        table.add_row(mode, interval(exam))
    console.print(table)
    return Score(
        heldout=exams["sampled"].mean,
        heldout_greedy=exams["greedy"].mean,
        tasks=len(exams["sampled"].rollouts),
        failed=sum(exam.failed for exam in exams.values()),
        seconds=round(time.monotonic() - began, 1),
        model=config.model.path,
    )
