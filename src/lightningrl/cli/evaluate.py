"""`lightningrl eval recipe.toml --checkpoint DIR`: held-out reward of any model folder, reproducible to the last digit."""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightningrl.cli.live import Progress
from lightningrl.cli.report import interval
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
    return asyncio.run(_evaluate(config, console=console))


async def _evaluate(config: Config, *, console: Console) -> Score:
    began = time.monotonic()
    progress = Progress(console, name=f"{config.name}: held-out tasks", steps=0, where=config.model.path)
    with tempfile.TemporaryDirectory(prefix="lightningrl-eval-") as scratch, progress:
        async with lightning(config, Path(scratch)) as server:
            loop = server.loop(progress)
            exams: dict[Mode, Exam] = {mode: await loop.examine(0, mode, config.tasks.heldout) for mode in MODES}
    table = Table(title=f"Reward on {config.tasks.heldout} held-out tasks, with 95 % intervals", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(config.model.path, justify="right", overflow="fold")
    for mode, exam in exams.items():
        table.add_row(mode, interval(exam))
    console.print(table)
    failed = sum(rollout.status == "failed" for exam in exams.values() for rollout in exam.rollouts)
    return Score(
        heldout=exams["sampled"].mean,
        heldout_greedy=exams["greedy"].mean,
        tasks=config.tasks.heldout,
        failed=failed,
        seconds=round(time.monotonic() - began, 1),
        model=config.model.path,
    )
